//! The image of a shard: what another process needs to go on in its place.
//!
//! It is that of a shard which has lost all its connections. What a lost connection makes a shard forget is not in it: pulls that wait,
//! mirrors of receivers, who follows streams, what is known of links, questions to worker 0. Peers ask and send again.

pub(super) mod floats;
mod table_image;

pub(super) use floats::Floats;
pub use table_image::{ChunkImage, StoreImage, TableImage};

use super::aggregators::Aggregators;
use super::delivery::DeliveryImage;
use super::members::Members;
use crate::limits;
use crate::types::{ShardId, TableId};
use crate::wire::Plan;
use crate::wire::bounded::sequence;
use serde::{Deserialize, Serialize};

/// The first bytes of an image; the last one is the version of what follows.
const MAGIC: [u8; 4] = *b"PMI\x01";

/// Everything that lasts of a shard when all its connections are lost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardImage {
    pub(super) shard: Option<ShardId>,
    pub(super) plan: Option<Plan>,
    pub(super) members: Members,
    pub(super) aggregators: Aggregators,
    pub(super) delivery: DeliveryImage,
    pub(super) bytes_pushed: u64,
    pub(super) stopped: bool,
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_TABLES }>")]
    pub(super) tables: Vec<TableImage>,
}

impl ShardImage {
    /// The shard's number, if it had one.
    pub fn shard(&self) -> Option<ShardId> {
        self.shard
    }

    /// The plan that it had entered.
    pub fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    /// The tables by number, also those of which the shard holds nothing.
    pub fn tables(&self) -> impl Iterator<Item = (TableId, &TableImage)> {
        (0..).map(TableId).zip(&self.tables)
    }

    /// Takes out the tables by number.
    pub fn into_tables(self) -> Vec<TableImage> {
        self.tables
    }

    /// As bytes, for another process of the same release.
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_extend(self, MAGIC.to_vec()).expect("memory takes all that there is")
    }

    /// Reads what [`ShardImage::encode`] wrote. The memory that is taken is a multiple of the bytes that are there, whatever they say. The error
    /// says what is wrong with them.
    pub fn decode(bytes: &[u8]) -> Result<ShardImage, String> {
        let Some(body) = bytes.strip_prefix(&MAGIC) else {
            return Err("this is no image of a shard, or one of another release".into());
        };
        let (image, rest): (ShardImage, &[u8]) =
            postcard::take_from_bytes(body).map_err(|error| format!("the image cannot be read: {error}"))?;
        if !rest.is_empty() {
            return Err(format!("{} bytes follow the image", rest.len()));
        }
        image.check()?;
        Ok(image)
    }

    /// Whether its tables have as many parameters as its plan puts onto the shard: memory is taken by the plan.
    pub(super) fn check(&self) -> Result<(), String> {
        self.aggregators.check()?;
        let Some(plan) = &self.plan else {
            let is_empty = self.tables.is_empty();
            return if is_empty { Ok(()) } else { Err("the image has tables, and no plan".into()) };
        };
        plan.check().map_err(|why| format!("the image's plan cannot be used: {why}"))?;
        if self.tables.len() != plan.tables.len() {
            return Err(format!("the image has {} of {} tables", self.tables.len(), plan.tables.len()));
        }
        for (chunks, (id, image)) in plan.chunks().iter().zip(self.tables()) {
            let own = chunks.iter().filter(|chunk| Some(chunk.shard) == self.shard);
            let elements: u64 = own.map(|chunk| u64::from(chunk.len)).sum();
            if image.store.parameters().len() as u64 != elements {
                let name = &plan.tables[id.0 as usize].name;
                return Err(format!(
                    "table `{name}` has {elements} parameters here, and not as many in the image"
                ));
            }
        }
        Ok(())
    }
}
