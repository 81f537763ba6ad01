//! A table's layout: its chunks, the shards that hold them, and gradients that fit it.

use super::{Gradient, PullOptions, WorkerError};
use crate::codec::{Factors, LayerRange};
use crate::limits;
use crate::region::Partition;
use crate::table::{Chunk, Layer, TableSpec};
use crate::types::ShardId;
use crate::wire::DType;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Rows that one shard holds, each with its place in what the application asked for.
#[derive(Debug)]
pub(super) struct ShardRows {
    pub(super) shard: ShardId,
    pub(super) rows: Vec<RowPlace>,
}

/// Rows that one pull frame asks for at most.
const ROWS_PER_PULL: usize = limits::MAX_DATA_BYTES / 8;

impl ShardRows {
    /// The rows of each pull; of a shard of which none is wanted any more, of one for the leave to go on.
    pub(super) fn pulls(&self) -> impl Iterator<Item = Vec<RowPlace>> {
        (0..self.rows.len().div_ceil(ROWS_PER_PULL).max(1)).map(|part| {
            let end = self.rows.len().min((part + 1) * ROWS_PER_PULL);
            self.rows[part * ROWS_PER_PULL..end].to_vec()
        })
    }
}

/// A row, and which of the rows that the application asked for it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowPlace {
    pub(super) row: u32,
    pub(super) place: u32,
}

/// A share of an answer: so many of the parts that it is cut into. Each shard's chunks come one after the other, and those of several
/// shards side by side, so a part has some chunks of every shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// The first parts.
    pub parts: usize,
    /// All parts.
    pub of: usize,
}

impl Share {
    /// Of so many chunks.
    fn chunks(self, all: usize) -> usize {
        all * self.parts / self.of
    }
}

/// A table's shape, cut into chunks. There are none before the plan.
#[derive(Debug)]
pub(super) struct Layout {
    spec: TableSpec,
    chunks: Vec<Chunk>,
    /// Chunk numbers of each shard, ascending.
    by_shard: Vec<(ShardId, Vec<u32>)>,
    /// The bytes of each shard's chunks in memory for the whole table, if that has elements of four bytes, and of two.
    partitions: [Arc<Partition>; 2],
}

impl Layout {
    pub(super) fn new(spec: TableSpec) -> Layout {
        let partitions = [(); 2].map(|()| Arc::new(Partition::new(0, [])));
        Layout { spec, chunks: Vec::new(), by_shard: Vec::new(), partitions }
    }

    /// Takes the plan's word on where the chunks are.
    pub(super) fn place(&mut self, chunks: Vec<Chunk>) {
        let mut by_shard: BTreeMap<ShardId, Vec<u32>> = BTreeMap::new();
        for (number, chunk) in (0..).zip(&chunks) {
            by_shard.entry(chunk.shard).or_default().push(number);
        }
        self.partitions = [4, 2].map(|width| {
            let bytes_of = |number: &u32| {
                let place = elements_of(&chunks[*number as usize]);
                place.start * width..place.end * width
            };
            let parts = by_shard.values().map(|numbers| numbers.iter().map(bytes_of).collect());
            Arc::new(Partition::new(4 * self.elements(), parts))
        });
        self.by_shard = by_shard.into_iter().collect();
        self.chunks = chunks;
    }

    pub(super) fn spec(&self) -> &TableSpec {
        &self.spec
    }

    pub(super) fn name(&self) -> &str {
        &self.spec.name
    }

    /// The table's layers, in the order of their elements.
    pub(super) fn layers(&self) -> Vec<LayerRange> {
        LayerRange::of_table(&self.spec)
    }

    /// Whether it is pushed and pulled by rows.
    pub(super) fn is_sparse(&self) -> bool {
        self.spec.rows
    }

    pub(super) fn elements(&self) -> usize {
        self.spec.elements() as usize
    }

    pub(super) fn row_width(&self) -> usize {
        self.spec.row_elements() as usize
    }

    /// The shards that hold some of it, ascending.
    pub(super) fn shards(&self) -> impl ExactSizeIterator<Item = ShardId> + '_ {
        self.by_shard.iter().map(|(shard, _)| *shard)
    }

    pub(super) fn shard_count(&self) -> usize {
        self.by_shard.len()
    }

    /// Which of [`Layout::shards`] it is.
    pub(super) fn index_of(&self, shard: ShardId) -> Option<usize> {
        self.by_shard.binary_search_by_key(&shard, |(of, _)| *of).ok()
    }

    fn numbers(&self, shard: ShardId) -> &[u32] {
        self.index_of(shard).map_or(&[], |index| &self.by_shard[index].1)
    }

    /// The chunks of a shard with their numbers.
    pub(super) fn chunks_of(&self, shard: ShardId) -> impl ExactSizeIterator<Item = (u32, Chunk)> + '_ {
        self.numbers(shard).iter().map(|&number| (number, self.chunks[number as usize]))
    }

    /// The bytes of each of [`Layout::shards`] in memory for the whole table, which has elements of this type.
    pub(super) fn partition(&self, dtype: DType) -> &Arc<Partition> {
        &self.partitions[usize::from(dtype != DType::F32)]
    }

    /// All chunks with their numbers.
    pub(super) fn chunks(&self) -> impl ExactSizeIterator<Item = (u32, Chunk)> + '_ {
        (0..self.chunks.len()).map(|number| (number as u32, self.chunks[number]))
    }

    /// The elements of all chunks, one after the other.
    pub(super) fn ranges(&self) -> Vec<Range<usize>> {
        self.chunks.iter().map(elements_of).collect()
    }

    /// Numbers of the chunks that have some of a range of elements.
    pub(super) fn chunks_in(&self, elements: &Range<usize>) -> Range<u32> {
        let first = self.chunks.partition_point(|chunk| elements_of(chunk).end <= elements.start);
        let end = self.chunks.partition_point(|chunk| elements_of(chunk).start < elements.end);
        first as u32..end as u32
    }

    pub(super) fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// How many of a shard's chunks belong to a share of its answer.
    pub(super) fn chunks_of_share(&self, shard: ShardId, share: Share) -> usize {
        share.chunks(self.numbers(shard).len())
    }

    /// The elements of each part of an answer that is cut into so many.
    pub(super) fn answer_parts(&self, of: usize) -> Vec<Vec<Range<usize>>> {
        let part = |number: usize| {
            let chunks = self.by_shard.iter().flat_map(|(_, numbers)| {
                let [start, end] =
                    [number, number + 1].map(|parts| Share { parts, of }.chunks(numbers.len()));
                numbers[start..end].iter().map(|&number| elements_of(&self.chunks[number as usize]))
            });
            chunks.fold(Vec::new(), |mut ranges: Vec<Range<usize>>, chunk| {
                match ranges.last_mut() {
                    Some(last) if last.end == chunk.start => last.end = chunk.end,
                    _ => ranges.push(chunk),
                }
                ranges
            })
        };
        (0..of).map(part).collect()
    }

    /// One of the chunks of a shard, counted from its first.
    pub(super) fn chunk_of(&self, shard: ShardId, index: usize) -> Option<(u32, Chunk)> {
        let number = *self.numbers(shard).get(index)?;
        Some((number, self.chunks[number as usize]))
    }

    /// The chunk of this number.
    pub(super) fn chunk_at(&self, number: u32) -> Chunk {
        self.chunks[number as usize]
    }

    /// The shard of a chunk, if there is such a chunk.
    pub(super) fn shard_of_chunk(&self, number: u32) -> Option<ShardId> {
        self.chunks.get(number as usize).map(|chunk| chunk.shard)
    }

    /// The number of the chunk that holds a row, and the chunk.
    pub(super) fn chunk_of_row(&self, row: u32) -> (u32, &Chunk) {
        let element = u64::from(row) * self.row_width() as u64;
        let number = self.chunks.partition_point(|chunk| chunk.start <= element) - 1;
        (number as u32, &self.chunks[number])
    }

    /// Cuts ascending rows by the shard that holds them; every row with its place in `rows`. Shards with none are
    /// left out.
    pub(super) fn rows_by_shard(&self, rows: &[u32]) -> Result<Vec<ShardRows>, WorkerError> {
        self.check_rows(rows)?;
        let mut by_shard: BTreeMap<ShardId, Vec<RowPlace>> = BTreeMap::new();
        for (place, &row) in (0..).zip(rows) {
            by_shard.entry(self.chunk_of_row(row).1.shard).or_default().push(RowPlace { row, place });
        }
        Ok(by_shard.into_iter().map(|(shard, rows)| ShardRows { shard, rows }).collect())
    }

    pub(super) fn all_rows_by_shard(&self) -> Vec<ShardRows> {
        let rows: Vec<u32> = (0..self.spec.shape[0] as u32).collect();
        self.rows_by_shard(&rows).expect("all rows are rows")
    }

    /// Whether a pull says which rows it is of, where the table is one of rows.
    pub(super) fn check_pull(&self, options: &PullOptions<'_>) -> Result<(), WorkerError> {
        if self.is_sparse() == options.rows.is_some() || options.now {
            return Ok(());
        }
        let sentence =
            if self.is_sparse() { "is sparse: name the rows to pull" } else { "is dense: pull it whole" };
        Err(WorkerError::Order(format!("table `{}` {sentence}", self.name())))
    }

    /// Whether a gradient fits.
    pub(super) fn check_gradient(&self, gradient: &Gradient<'_>) -> Result<(), WorkerError> {
        match gradient {
            Gradient::Dense(_) | Gradient::Product { .. } if self.is_sparse() => {
                Err(self
                    .misfit("rows and their gradients, as it is sparse".into(), "a dense gradient".into()))
            }
            Gradient::Rows { .. } if !self.is_sparse() => {
                Err(self.misfit("a gradient of the whole table, as it is dense".into(), "single rows".into()))
            }
            Gradient::Dense(values) | Gradient::Product { values, .. } if values.len() != self.elements() => {
                let expected = format!("{} elements (shape {:?})", self.elements(), self.spec.shape);
                Err(self.misfit(expected, values.len().to_string()))
            }
            Gradient::Rows { rows, values } if values.len() != rows.len() * self.row_width() => {
                let expected = format!("{} elements for {} rows", rows.len() * self.row_width(), rows.len());
                Err(self.misfit(expected, values.len().to_string()))
            }
            Gradient::Rows { rows, .. } => self.check_rows(rows),
            Gradient::Product { factors, .. } => self.check_factors(factors),
            Gradient::Dense(_) => Ok(()),
        }
    }

    /// The name of the layer with this number.
    pub(super) fn layer_name(&self, layer: usize) -> &str {
        self.spec.layers().nth(layer).map_or(self.name(), |layer| layer.name)
    }

    /// The same for a gradient of one layer of a pack.
    pub(super) fn check_layer(&self, layer: usize, gradient: &Gradient<'_>) -> Result<(), WorkerError> {
        let Some(layer) = self.spec.layers.get(layer) else {
            return Err(self.misfit("one of its layers".into(), format!("number {layer}")));
        };
        if let Gradient::Dense(values) = gradient
            && values.len() as u64 == layer.elements()
        {
            return Ok(());
        }
        let Layer { name, shape, .. } = layer;
        // It is checked as the table that it would be without the others.
        Layout::new(TableSpec::dense(name.clone(), shape.clone())).check_gradient(gradient)
    }

    fn check_factors(&self, Factors { rank, u, v }: &Factors<'_>) -> Result<(), WorkerError> {
        let (rank, columns) = (*rank as usize, self.spec.columns());
        let rows = self.elements().checked_div(columns).unwrap_or(0);
        let fits = (Some(u.len()), Some(v.len())) == (rows.checked_mul(rank), columns.checked_mul(rank));
        if rank > 0 && fits {
            return Ok(());
        }
        let expected = format!("factors of {rows} x {rank} and {rank} x {columns} elements");
        Err(self.misfit(expected, format!("{} and {}", u.len(), v.len())))
    }

    fn check_rows(&self, rows: &[u32]) -> Result<(), WorkerError> {
        if let Some(pair) = rows.windows(2).find(|pair| pair[0] >= pair[1]) {
            let found = format!("{} before {}", pair[0], pair[1]);
            return Err(self.misfit("strictly ascending row numbers".into(), found));
        }
        match rows.last() {
            Some(&row) if u64::from(row) >= self.spec.shape[0] => {
                Err(self.misfit(format!("row numbers below {}", self.spec.shape[0]), row.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// The error about something that does not fit.
    pub(super) fn misfit(&self, expected: String, found: String) -> WorkerError {
        WorkerError::Shape { table: self.spec.name.clone(), expected, found }
    }
}

/// A chunk's elements in its table.
pub(super) fn elements_of(chunk: &Chunk) -> Range<usize> {
    let start = chunk.start as usize;
    start..start + chunk.len as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::ServerId;

    fn shard(server: u32) -> ShardId {
        ShardId { server: ServerId(server), core: 0 }
    }

    /// Rows of three elements: two on one shard, two on another, and one more on the first.
    fn layout() -> Layout {
        let mut layout = Layout::new(TableSpec::sparse("rows", 5, 3));
        let chunk = |server, start, len| Chunk { shard: shard(server), start, len };
        layout.place(vec![chunk(1, 0, 6), chunk(0, 6, 6), chunk(1, 12, 3)]);
        layout
    }

    #[test]
    fn chunks_are_found_by_shard_and_by_row() {
        let layout = layout();
        assert_eq!(layout.shards().collect::<Vec<_>>(), [shard(0), shard(1)]);
        assert_eq!([0, 1, 2].map(|server| layout.index_of(shard(server))), [Some(0), Some(1), None]);
        assert_eq!((layout.shard_count(), layout.chunk_count(), layout.elements()), (2, 3, 15));
        let of = |server| layout.chunks_of(shard(server)).map(|(number, _)| number).collect::<Vec<_>>();
        assert_eq!((of(0), of(1), of(2)), (vec![1], vec![0, 2], vec![]));
        assert_eq!(layout.partition(DType::F32).ranges(1), [0..24, 48..60]);
        assert_eq!(layout.chunk_of(shard(1), 1).map(|(number, chunk)| (number, chunk.start)), Some((2, 12)));
        assert_eq!((layout.chunk_of(shard(1), 2), layout.chunk_of(shard(2), 0)), (None, None));
        assert_eq!([0, 1, 2, 3, 4].map(|row| layout.chunk_of_row(row).0), [0, 0, 1, 1, 2]);
    }

    #[test]
    fn rows_are_cut_by_shard_and_keep_their_place() {
        let cut = |rows: &[u32]| -> Vec<(ShardId, Vec<(u32, u32)>)> {
            let places = |of: ShardRows| of.rows.iter().map(|at| (at.row, at.place)).collect();
            layout().rows_by_shard(rows).unwrap().into_iter().map(|of| (of.shard, places(of))).collect()
        };
        assert_eq!(cut(&[1, 2, 4]), [(shard(0), vec![(2, 1)]), (shard(1), vec![(1, 0), (4, 2)])]);
        assert_eq!(cut(&[3]), [(shard(0), vec![(3, 0)])]);
        assert_eq!(layout().all_rows_by_shard().iter().map(|of| of.rows.len()).sum::<usize>(), 5);
    }

    #[test]
    fn gradients_that_do_not_fit_are_refused_by_shape() {
        let (sparse, mut dense) = (layout(), Layout::new(TableSpec::dense("w", [2, 3])));
        dense.place(vec![Chunk { shard: shard(0), start: 0, len: 6 }]);
        let rows = |rows, values| Gradient::Rows { rows, values };
        assert_eq!(sparse.check_gradient(&rows(&[0, 4], &[1.0; 6])), Ok(()));
        assert_eq!(dense.check_gradient(&Gradient::Dense(&[1.0; 6])), Ok(()));
        for (what, layout, gradient, words) in [
            ("a dense one", &sparse, Gradient::Dense(&[1.0; 15]), "rows and their gradients"),
            ("rows", &dense, rows(&[0], &[1.0; 3]), "a gradient of the whole table"),
            ("too short", &dense, Gradient::Dense(&[1.0; 5]), "6 elements (shape [2, 3])"),
            ("of another width", &sparse, rows(&[0, 1], &[1.0; 4]), "6 elements for 2 rows"),
            ("a row twice", &sparse, rows(&[1, 1], &[1.0; 6]), "strictly ascending row numbers"),
            ("no row", &sparse, rows(&[5], &[1.0; 3]), "row numbers below 5"),
        ] {
            let error = layout.check_gradient(&gradient).expect_err(what).to_string();
            assert!(error.contains(words) && error.contains(layout.name()), "{what}: {error}");
        }
    }

    #[test]
    fn the_gradient_of_a_layer_is_checked_as_that_of_a_table_would_be() {
        let layer =
            |name: &str, start, shape: &[u64]| Layer { name: name.into(), start, shape: shape.to_vec() };
        let layers = vec![layer("a", 0, &[2, 3]), layer("b", 6, &[4])];
        let layout = Layout::new(TableSpec { layers, ..TableSpec::dense("pack", [10]) });
        assert_eq!((layout.layer_name(0), layout.layer_name(1)), ("a", "b"));
        assert_eq!(layout.check_layer(0, &Gradient::Dense(&[1.0; 6])), Ok(()));
        let factors = |rank| Factors { rank, u: &[1.0; 2], v: &[1.0; 3] };
        let product = |rank| Gradient::Product { values: &[1.0; 6], factors: factors(rank) };
        assert_eq!(layout.check_layer(0, &product(1)), Ok(()));
        for (layer, gradient, expected) in [
            (0, Gradient::Dense(&[1.0; 4]), "table `a`: expected 6 elements (shape [2, 3])"),
            (1, Gradient::Dense(&[1.0; 10]), "table `b`: expected 4 elements (shape [4])"),
            (0, product(2), "table `a`: expected factors of 2 x 2 and 2 x 3"),
            (
                1,
                Gradient::Rows { rows: &[0], values: &[1.0; 4] },
                "table `b`: expected a gradient of the whole",
            ),
            (2, Gradient::Dense(&[1.0; 4]), "table `pack`: expected one of its layers"),
        ] {
            let why = layout.check_layer(layer, &gradient).unwrap_err().to_string();
            assert!(why.contains(expected), "{why}");
        }
    }

    #[test]
    fn factors_fit_the_rows_and_columns_of_their_table() {
        let mut layout = Layout::new(TableSpec::dense("w", [4, 3]));
        layout.place(vec![Chunk { shard: shard(0), start: 0, len: 12 }]);
        let check = |rank, u: usize, v: usize| {
            let (u, v) = (vec![0.0; u], vec![0.0; v]);
            layout.check_gradient(&Gradient::Product {
                values: &[0.0; 12],
                factors: Factors { rank, u: &u, v: &v },
            })
        };
        assert_eq!(check(2, 8, 6), Ok(()));
        for (rank, u, v) in [(0, 0, 0), (2, 7, 6), (2, 8, 5), (2, 6, 8), (3, 8, 6)] {
            let error = check(rank, u, v).expect_err("it does not fit").to_string();
            assert!(error.contains(&format!("factors of 4 x {rank} and {rank} x 3")), "{error}");
        }
    }
}
