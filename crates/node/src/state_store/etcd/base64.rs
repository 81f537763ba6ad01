//! Base64, in which keys and values are in JSON.

const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub(super) fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits =
            group.iter().zip([16, 8, 0]).fold(0u32, |bits, (byte, shift)| bits | u32::from(*byte) << shift);
        for (place, shift) in [18, 12, 6, 0].into_iter().enumerate() {
            let letter = LETTERS[(bits >> shift & 63) as usize];
            text.push(if place <= group.len() { letter.into() } else { '=' });
        }
    }
    text
}

/// `None` for what is no base64.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for group in text.as_bytes().chunks(4) {
        let letters = group.iter().take_while(|letter| **letter != b'=').count();
        if group.len() != 4 || letters < 2 {
            return None;
        }
        let mut bits = 0u32;
        for (letter, shift) in group[..letters].iter().zip([18, 12, 6, 0]) {
            let value = LETTERS.iter().position(|known| known == letter)?;
            bits |= (value as u32) << shift;
        }
        bytes.extend_from_slice(&bits.to_be_bytes()[1..letters]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        for (bytes, text) in
            [(&b""[..], ""), (b"f", "Zg=="), (b"fo", "Zm8="), (b"foo", "Zm9v"), (b"foob", "Zm9vYg==")]
        {
            assert_eq!((encode(bytes).as_str(), decode(text).as_deref()), (text, Some(bytes)));
        }
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), Some(all));
        assert!(["Zg", "Z===", "Zg=", "Z!=="].iter().all(|wrong| decode(wrong).is_none()));
    }
}
