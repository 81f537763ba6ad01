//! Memory that its owner lends for reading, and that comes home by itself.
//!
//! A [`Pool`] owns buffers of one use. It lends one as a [`Lease`], which frames and readers on other threads may clone. Who
//! owns the buffer follows from values, not from counts: the owner either has the [`Buffer`], or it is lent, and the last lease
//! brings it back to the pool when it is dropped.

#![allow(
    clippy::disallowed_types,
    reason = "leases come home, and gradients are prepared, on other threads than the role's"
)]

use crate::store::{Allocate, Buffer};
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Buffers of one use: those that are free, and how many are lent. Clones are of the same pool, on whichever thread.
#[derive(Debug, Clone)]
pub struct Pool(Arc<Shelf>);

/// What the clones of a pool, and its leases, share.
#[derive(Debug)]
struct Shelf {
    /// Free buffers that are kept at most; more are given back to the system.
    keep: usize,
    stock: Mutex<Stock>,
}

#[derive(Debug, Default)]
struct Stock {
    free: Vec<Buffer>,
    lent: usize,
    lent_bytes: usize,
}

/// What the leases of one buffer share.
#[derive(Debug)]
struct Loan {
    /// Gone once the owner has taken it back.
    buffer: Option<Buffer>,
    bytes: usize,
    home: Option<Pool>,
}

/// A buffer that may be read and is not changed. The last lease of a buffer brings it home.
#[derive(Debug, Clone)]
pub struct Lease(Arc<Loan>);

impl Pool {
    /// An empty pool that keeps up to `keep` free buffers.
    pub fn new(keep: usize) -> Pool {
        Pool(Arc::new(Shelf { keep, stock: Mutex::default() }))
    }

    /// A buffer of `len` elements, whose contents are any.
    pub fn take(&self, len: usize, memory: &dyn Allocate) -> Buffer {
        let kept = {
            let free = &mut self.stock().free;
            free.iter().position(|buffer| buffer.len() == len).map(|index| free.swap_remove(index))
        };
        kept.unwrap_or_else(|| memory.zeroed(len))
    }

    /// Keeps a buffer that is of no use at the moment.
    pub fn keep(&self, buffer: Buffer) {
        let surplus = self.0.put(&mut self.stock(), Some(buffer));
        drop(surplus);
    }

    /// Lends a buffer. It comes home when the last lease is dropped.
    pub fn lend(&self, buffer: Buffer) -> Lease {
        let bytes = buffer.memory_bytes();
        let mut stock = self.stock();
        stock.lent += 1;
        stock.lent_bytes += bytes;
        Lease(Arc::new(Loan { buffer: Some(buffer), bytes, home: Some(self.clone()) }))
    }

    /// Buffers that are lent.
    pub fn lent(&self) -> usize {
        self.stock().lent
    }

    /// Bytes of all its buffers, lent ones included.
    pub fn memory_bytes(&self) -> usize {
        let stock = self.stock();
        stock.lent_bytes + stock.free.iter().map(Buffer::memory_bytes).sum::<usize>()
    }

    /// A loan has ended. The buffer comes with it, unless its owner has taken that back.
    fn end_loan(&self, buffer: Option<Buffer>, bytes: usize) {
        let surplus = {
            let mut stock = self.stock();
            stock.lent -= 1;
            stock.lent_bytes -= bytes;
            self.0.put(&mut stock, buffer)
        };
        drop(surplus);
    }

    fn stock(&self) -> MutexGuard<'_, Stock> {
        // Nothing that holds it can panic half-way.
        self.0.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shelf {
    /// Puts a buffer to the free ones, or returns it when there are enough: giving it back to the system takes a while, and
    /// others may wait for the stock.
    fn put(&self, stock: &mut Stock, buffer: Option<Buffer>) -> Option<Buffer> {
        if stock.free.len() >= self.keep {
            return buffer;
        }
        stock.free.extend(buffer);
        None
    }
}

impl Lease {
    /// Ends the loan if this is its only lease: the buffer is the caller's. The lease comes back where others have it too, and
    /// the caller copies: which of the two happens may depend on readers on other threads, the contents of frames do not.
    pub fn reclaim(self) -> Result<Buffer, Lease> {
        let mut loan = Arc::try_unwrap(self.0).map_err(Lease)?;
        Ok(loan.buffer.take().expect("only a loan that has ended is without its buffer"))
    }
}

/// A buffer that belongs to no pool: it is given back to the system.
impl From<Buffer> for Lease {
    fn from(buffer: Buffer) -> Lease {
        Lease(Arc::new(Loan { bytes: buffer.memory_bytes(), buffer: Some(buffer), home: None }))
    }
}

impl Deref for Lease {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        self.0.buffer.as_ref().expect("only a loan that has ended is without its buffer")
    }
}

impl PartialEq for Lease {
    fn eq(&self, other: &Lease) -> bool {
        **self == **other
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(home) = &self.home {
            home.end_loan(self.buffer.take(), self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Heap;

    #[test]
    fn a_buffer_comes_home_with_its_last_lease() {
        let pool = Pool::new(1);
        let mut buffer = pool.take(8, &Heap);
        buffer.as_mut_slice().fill(7.0);
        let lease = pool.lend(buffer);
        let other = lease.clone();
        assert_eq!((lease.as_slice(), pool.lent()), (&[7.0; 8][..], 1));
        let bytes = pool.memory_bytes();
        drop(lease);
        assert_eq!(pool.take(8, &Heap).as_slice(), [0.0; 8], "the other lease has it");
        drop(other);
        assert_eq!((pool.lent(), pool.memory_bytes()), (0, bytes));
        assert_eq!(pool.take(8, &Heap).as_slice(), [7.0; 8], "the same memory");
    }

    #[test]
    fn leases_may_end_on_another_thread() {
        fn crosses_threads<T: Send + Sync>(_: &T) {}
        let pool = Pool::new(1);
        crosses_threads(&pool.lend(pool.take(8, &Heap)));
        assert_eq!(pool.lent(), 0);
    }

    #[test]
    fn a_lease_that_others_have_too_is_not_reclaimed() {
        let pool = Pool::new(1);
        let lease = pool.lend(pool.take(8, &Heap));
        let other = lease.clone();
        let lease = lease.reclaim().expect_err("there is another");
        drop(other);
        assert_eq!((lease.reclaim().map(|buffer| buffer.len()), pool.lent()), (Ok(8), 0));
        assert_eq!(pool.memory_bytes(), 0, "it is the caller's");
    }

    #[test]
    fn a_pool_keeps_no_more_than_it_should() {
        let pool = Pool::new(1);
        let leases = [(); 3].map(|()| pool.lend(pool.take(1024, &Heap)));
        assert_eq!(pool.memory_bytes(), 3 * 4096);
        drop(leases);
        assert_eq!(pool.memory_bytes(), 4096);
    }
}
