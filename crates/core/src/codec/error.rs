//! Errors of codecs.

/// Why values could not be encoded, or a payload not be decoded. Nothing was changed by any of these.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// There is no code for it.
    #[error("the values to encode have NaN or Inf in them; look for them where they are computed")]
    NonFinite,
    /// The residual and the new values do not fit an f32 together.
    #[error("what was not sent before and the new values add up to more than an f32 holds; clip the values")]
    Overflow,
    /// Entries that the caller chose or quantised do not fit the table or its chain.
    #[error("what was prepared to be sent has {0}; prepare it by the codec and the chunks of this table")]
    Input(String),
    /// The sender follows another plan, or another release.
    #[error(
        "the payload was made by another codec than `{expected}`; give both ends the same codec and release"
    )]
    OtherCodec {
        /// The receiver's codec.
        expected: String,
    },
    /// Anything else that is wrong with it.
    #[error("the payload has {0}")]
    Payload(String),
}
