//! An object store: S3, Google Cloud Storage or Azure. An object is there whole or not at all, so that no other name is needed.
//!
//! Requests are made where an archive is asked, which is never a loop that others wait for, and block until they are answered. Every
//! one has an end: the store's client gives each attempt a time-out and makes few attempts, and [`PATIENCE`] bounds all that it does
//! beside these, such as asking for credentials.

use super::{Draft, Source, Storage};
use futures_util::stream::BoxStream;
use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{
    Error, GetOptions, GetRange, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig,
};
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::runtime::{Builder, Runtime};

/// Attempts after the first, and how long after it another is still made.
const RETRIES: usize = 5;
const RETRIED_FOR: Duration = Duration::from_secs(30);
/// The longest time for one request with all its attempts. It is longer than these may take with usual time-outs.
const PATIENCE: Duration = Duration::from_secs(180);
/// The longest time for what only tidies up.
const SHORT_PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of a part of a large object. Stores take 10 000 parts, all of the same length but for the last: 160 GB.
const PART: usize = 16 << 20;
/// Bytes that are asked for at once: what a slow line brings within an attempt's time-out.
const PIECE: usize = 8 << 20;
/// Objects that are looked at for the names of folders. More are not an archive's.
const MAX_OBJECTS: usize = 1 << 20;
/// Characters of what a store said that go into a sentence.
const MAX_EXPLANATION: usize = 400;

/// A prefix in a bucket, with a folder for every checkpoint.
pub(super) struct Bucket {
    client: Client,
    prefix: Path,
}

impl Bucket {
    /// The bucket and prefix that a URL names. What else is needed (credentials, another endpoint) is in the environment.
    pub(super) fn open(url: &str) -> io::Result<Bucket> {
        let unknown = || {
            io::Error::other(
                "expected a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX",
            )
        };
        let (scheme, rest) = url.split_once("://").ok_or_else(unknown)?;
        let prefix = rest.split_once('/').map_or("", |(_, prefix)| prefix);
        let prefix = Path::from_url_path(prefix).map_err(io::Error::other)?;
        let retry =
            RetryConfig { max_retries: RETRIES, retry_timeout: RETRIED_FOR, ..RetryConfig::default() };
        let store: Result<Arc<dyn ObjectStore>, Error> = match scheme {
            "s3" => {
                let store = AmazonS3Builder::from_env().with_url(url).with_retry(retry).build();
                store.map(|store| Arc::new(store) as _)
            }
            "gs" => {
                let store = GoogleCloudStorageBuilder::from_env().with_url(url).with_retry(retry).build();
                store.map(|store| Arc::new(store) as _)
            }
            "az" => {
                let store = MicrosoftAzureBuilder::from_env().with_url(url).with_retry(retry).build();
                store.map(|store| Arc::new(store) as _)
            }
            _ => return Err(unknown()),
        };
        Bucket::new(store.map_err(explain)?, prefix)
    }

    #[cfg(test)]
    pub(super) fn in_memory() -> Bucket {
        let store = Arc::new(object_store::memory::InMemory::new());
        Bucket::new(store, Path::from("runs/job")).expect("a runtime is made")
    }

    fn new(store: Arc<dyn ObjectStore>, prefix: Path) -> io::Result<Bucket> {
        // Several archives' threads may wait for requests at the same time; whichever is there drives the connections of all.
        let runtime = Arc::new(Builder::new_current_thread().enable_all().build()?);
        Ok(Bucket { client: Client { runtime, store }, prefix })
    }

    fn location(&self, folder: &str, name: &str) -> Path {
        self.prefix.clone().join(folder).join(name)
    }
}

impl Storage for Bucket {
    fn folders(&self) -> io::Result<Vec<String>> {
        let mut objects = self.client.store.list(Some(&self.prefix));
        let mut names = BTreeSet::new();
        for _ in 0..MAX_OBJECTS {
            let Some(object) = self.client.next(&mut objects)? else {
                return Ok(names.into_iter().collect());
            };
            let mut parts = object.location.prefix_match(&self.prefix).into_iter().flatten();
            if let (Some(folder), Some(_)) = (parts.next(), parts.next()) {
                names.insert(folder.as_ref().to_owned());
            }
        }
        Err(io::Error::other("it has too many objects; give a prefix that has nothing but checkpoints"))
    }

    fn create(&self, folder: &str, name: &str) -> io::Result<Box<dyn Draft>> {
        let (client, location) = (self.client.clone(), self.location(folder, name));
        Ok(Box::new(Upload { client, location, part: Vec::new(), multipart: None }))
    }

    fn open(&self, folder: &str, name: &str) -> io::Result<Box<dyn Source>> {
        let location = self.location(folder, name);
        let meta = self.client.wait(self.client.store.head(&location))?;
        Ok(Box::new(Object { client: self.client.clone(), meta }))
    }

    fn remove(&self, folder: &str, name: &str) -> io::Result<()> {
        match self.client.wait(self.client.store.delete(&self.location(folder, name))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    fn remove_folder(&self, folder: &str) -> io::Result<()> {
        let Client { store, .. } = &self.client;
        let objects = store.list(Some(&self.prefix.clone().join(folder)));
        let mut removed = store.delete_stream(objects.map_ok(|object| object.location).boxed());
        while self.client.next(&mut removed)?.is_some() {}
        Ok(())
    }
}

/// A way to a store.
#[derive(Clone)]
struct Client {
    runtime: Arc<Runtime>,
    store: Arc<dyn ObjectStore>,
}

impl Client {
    fn wait<T>(&self, request: impl Future<Output = object_store::Result<T>>) -> io::Result<T> {
        self.wait_for(PATIENCE, request)
    }

    fn wait_for<T>(
        &self,
        patience: Duration,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> io::Result<T> {
        match self.runtime.block_on(async { tokio::time::timeout(patience, request).await }) {
            Ok(answer) => answer.map_err(explain),
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("the store did not answer for {} s", patience.as_secs()),
            )),
        }
    }

    /// The next of several answers.
    fn next<T>(&self, answers: &mut BoxStream<'_, object_store::Result<T>>) -> io::Result<Option<T>> {
        self.wait(answers.try_next())
    }
}

/// An object that is being written: in parts when it is large, and otherwise with one request.
struct Upload {
    client: Client,
    location: Path,
    /// What no request has taken yet.
    part: Vec<u8>,
    /// From the first full part on.
    multipart: Option<Box<dyn MultipartUpload>>,
}

impl Upload {
    fn send_part(&mut self) -> io::Result<()> {
        let Upload { client, location, part, multipart } = self;
        let upload = match multipart {
            Some(upload) => upload,
            None => multipart.insert(client.wait(client.store.put_multipart(location))?),
        };
        client.wait(upload.put_part(std::mem::take(part).into()))
    }
}

impl Write for Upload {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.part.len() == PART {
            self.send_part()?;
        }
        let taken = bytes.len().min(PART - self.part.len());
        self.part.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    /// Parts but the last have to be full.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Draft for Upload {
    fn finish(mut self: Box<Self>) -> io::Result<()> {
        if self.multipart.is_none() {
            let part = std::mem::take(&mut self.part);
            return self.client.wait(self.client.store.put(&self.location, part.into())).map(|_| ());
        }
        self.send_part()?;
        let Some(upload) = &mut self.multipart else { return Ok(()) };
        self.client.wait(upload.complete())?;
        self.multipart = None;
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Some(mut upload) = self.multipart.take() {
            // Parts of an upload that is not completed cost money until somebody removes them.
            let _ = self.client.wait_for(SHORT_PATIENCE, upload.abort());
        }
    }
}

/// An object that is read.
struct Object {
    client: Client,
    meta: ObjectMeta,
}

impl Source for Object {
    fn len(&self) -> u64 {
        self.meta.size
    }

    fn modified(&self) -> SystemTime {
        self.meta.last_modified.into()
    }

    fn read_at(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut at = at;
        for piece in bytes.chunks_mut(PIECE) {
            let end = at + piece.len() as u64;
            let options = GetOptions { range: Some(GetRange::Bounded(at..end)), ..GetOptions::default() };
            let filled = self.client.wait(async {
                let mut filled = 0;
                let mut parts = self.client.store.get_opts(&self.meta.location, options).await?.into_stream();
                while let Some(part) = parts.try_next().await? {
                    // A store that sends more than it was asked for takes no memory here.
                    let Some(room) = piece.get_mut(filled..filled + part.len()) else { return Ok(None) };
                    room.copy_from_slice(&part);
                    filled += part.len();
                }
                Ok(Some(filled))
            })?;
            if filled != Some(piece.len()) {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the store sent another number of bytes than it was asked for",
                ));
            }
            at = end;
        }
        Ok(())
    }
}

/// What a store said, in one line of bounded length.
fn explain(error: Error) -> io::Error {
    let kind = match &error {
        Error::NotFound { .. } => io::ErrorKind::NotFound,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => io::ErrorKind::PermissionDenied,
        _ => io::ErrorKind::Other,
    };
    let text = error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    io::Error::new(kind, text.chars().take(MAX_EXPLANATION).collect::<String>())
}
