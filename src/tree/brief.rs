//! Short descriptions of index batches from the first bytes of their encodings.

use super::tag;
use crate::config::{INDICES_SHOWN, KEY_BYTES_SHOWN};

/// Describes an int, a string, or a list or tuple of these, for example as `[3, 14, ... 64 in all]`. Returns `None` for
/// any other value, and if the bytes are damaged. `bytes` are the first bytes of an encoding of `len` bytes.
pub fn brief(bytes: &[u8], len: u64) -> Option<String> {
    let (whole, mut reader) = (len <= bytes.len() as u64, Prefix { bytes });
    let (open, close, count, ints) = match reader.byte()? {
        tag::INTS => {
            let (open, close) = brackets(reader.byte()?)?;
            (open, close, reader.varint()?, true)
        }
        group @ (tag::LIST | tag::TUPLE) => {
            let (open, close) = brackets(group)?;
            (open, close, reader.varint()?, false)
        }
        tag => return reader.item(tag),
    };
    // Each item takes at least one byte, so a larger count is damage.
    if count > len {
        return None;
    }
    let mut items = Vec::new();
    while (items.len() as u64) < count && items.len() < INDICES_SHOWN {
        let item = if ints { reader.int() } else { reader.byte().and_then(|tag| reader.item(tag)) };
        match item {
            Some(item) => items.push(item),
            None if whole || items.is_empty() => return None,
            None => break,
        }
    }
    let mut text = items.join(", ");
    if (items.len() as u64) < count {
        text += &format!(", ... {count} in all");
    }
    Some(format!("{open}{text}{close}"))
}

fn brackets(group: u8) -> Option<(char, char)> {
    match group {
        tag::LIST => Some(('[', ']')),
        tag::TUPLE => Some(('(', ')')),
        _ => None,
    }
}

/// The unread bytes.
struct Prefix<'a> {
    bytes: &'a [u8],
}

impl Prefix<'_> {
    fn take(&mut self, len: usize) -> Option<&[u8]> {
        let (taken, rest) = self.bytes.split_at_checked(len)?;
        self.bytes = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        Some(self.take(1)?[0])
    }

    fn int(&mut self) -> Option<String> {
        Some(i64::from_le_bytes(self.take(8)?.try_into().ok()?).to_string())
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..63).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn item(&mut self, tag: u8) -> Option<String> {
        match tag {
            tag::INT => self.int(),
            tag::STR => self.text(),
            _ => None,
        }
    }

    /// Reads a string whose bytes may be truncated.
    fn text(&mut self) -> Option<String> {
        let len = usize::try_from(self.varint()?).ok()?;
        let available = self.bytes.len().min(len);
        let shown = self.take(available)?.get(..available.min(KEY_BYTES_SHOWN))?;
        let valid = match std::str::from_utf8(shown) {
            Ok(text) => text,
            // The last character is truncated.
            Err(error) if error.error_len().is_none() => std::str::from_utf8(&shown[..error.valid_up_to()]).ok()?,
            Err(_) => return None,
        };
        let more = if valid.len() < len { "..." } else { "" };
        Some(format!("{valid:?}{more}"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Group, Writer};
    use super::*;

    const SHORT: usize = 64;

    fn written(write: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut Writer::new(&mut bytes));
        bytes
    }

    fn text(bytes: &[u8]) -> Option<String> {
        brief(&bytes[..bytes.len().min(SHORT)], bytes.len() as u64)
    }

    fn ints(group: u8, values: &[i64]) -> Vec<u8> {
        let mut bytes = vec![tag::INTS, group, values.len() as u8];
        values.iter().for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
        bytes
    }

    #[test]
    fn index_batches_are_shortened() {
        assert_eq!(text(&ints(tag::LIST, &[3, -1])).unwrap(), "[3, -1]");
        assert_eq!(text(&ints(tag::TUPLE, &[7])).unwrap(), "(7)");
        let many: Vec<i64> = (0..100).collect();
        assert_eq!(text(&ints(tag::LIST, &many)).unwrap(), "[0, 1, 2, 3, 4, 5, 6, ... 100 in all]");
        assert_eq!(text(&written(|out| out.int(12))).unwrap(), "12");
        assert_eq!(text(&written(|out| out.str("a\"b"))).unwrap(), "\"a\\\"b\"");
        let names = written(|out| {
            out.open(Group::List, 2);
            out.str("a");
            out.str(&"\u{e9}".repeat(50));
        });
        assert_eq!(text(&names).unwrap(), format!("[\"a\", \"{}\"...]", "\u{e9}".repeat(15)));
    }

    #[test]
    fn anything_else_has_no_description() {
        assert_eq!(text(&[]), None);
        assert_eq!(text(&[tag::NONE]), None);
        assert_eq!(text(&[tag::LIST, 2, tag::NONE, tag::NONE]), None);
        assert_eq!(text(&[tag::INTS, tag::DICT, 1]), None);
        assert_eq!(text(&[tag::LIST, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]), None);
        // The count of items exceeds the number of bytes.
        assert_eq!(text(&[tag::INTS, tag::LIST, 100]), None);
        assert_eq!(text(&[tag::STR, 2, 0xff, 0xff]), None);
    }

    #[test]
    fn arbitrary_bytes_do_not_panic() {
        let mut state = 1u64;
        for round in 0..20_000 {
            let mut bytes = [0u8; SHORT];
            for byte in &mut bytes {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                *byte = (state >> 56) as u8;
            }
            bytes[0] %= 20;
            brief(&bytes[..round % SHORT], if round % 2 == 0 { state } else { round as u64 % 100 });
        }
    }
}
