//! A reader of the part of OTLP's protobuf that has spans, their parents, and the names of their attributes.

use std::collections::BTreeSet;

/// A span as it was exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// 16 bytes in hex.
    pub trace: String,
    /// 8 bytes in hex.
    pub id: String,
    /// The id of its parent, empty for a root.
    pub parent: String,
    /// Its name.
    pub name: String,
    /// The names of its attributes.
    pub attributes: BTreeSet<String>,
}

/// The spans of an `ExportTraceServiceRequest`.
///
/// # Panics
/// The bytes are not such a message.
pub fn exported_spans(message: &[u8]) -> Vec<Span> {
    // resource_spans = 1, scope_spans = 2, spans = 2
    let scopes = parts(message, 1).flat_map(|resource| parts(resource, 2));
    scopes.flat_map(|scope| parts(scope, 2)).map(span).collect()
}

fn span(message: &[u8]) -> Span {
    let hex_of = |field| {
        parts(message, field)
            .next()
            .map(hex::encode)
            .unwrap_or_default()
    };
    let text = |part| String::from_utf8_lossy(part).into_owned();
    let name = parts(message, 5).next().map(text);
    // attributes = 9, and the key of each = 1
    let keys = parts(message, 9).flat_map(|attribute| parts(attribute, 1));
    Span {
        trace: hex_of(1),
        id: hex_of(2),
        parent: hex_of(4),
        name: name.unwrap_or_default(),
        attributes: keys.map(text).collect(),
    }
}

/// The length-delimited fields of number `wanted`.
fn parts(mut message: &[u8], wanted: u64) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        while !message.is_empty() {
            let key = varint(&mut message);
            let length = match key & 7 {
                0 => {
                    varint(&mut message);
                    continue;
                }
                1 => 8,
                2 => usize::try_from(varint(&mut message)).unwrap_or(usize::MAX),
                5 => 4,
                kind => panic!("protobuf knows no wire type {kind} in use here"),
            };
            assert!(
                length <= message.len(),
                "a field of {length} bytes in {} bytes",
                message.len()
            );
            let (field, rest) = message.split_at(length);
            message = rest;
            if key >> 3 == wanted && key & 7 == 2 {
                return Some(field);
            }
        }
        None
    })
}

fn varint(message: &mut &[u8]) -> u64 {
    let mut value = 0;
    for place in 0..10 {
        let (byte, rest) = message.split_first().expect("a number breaks off");
        *message = rest;
        value |= u64::from(byte & 0x7f) << (7 * place);
        if byte & 0x80 == 0 {
            return value;
        }
    }
    panic!("a number of more than ten bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_fields_are_found_between_others() {
        let field = |number: u8, body: &[u8]| [&[number << 3 | 2, body.len() as u8], body].concat();
        let span = [
            field(1, &[1; 16]),
            field(2, &[2; 8]),
            vec![6 << 3, 3],
            field(5, b"x"),
            field(9, &[field(1, b"key"), field(2, b"")].concat()),
        ]
        .concat();
        let fixed = [&[7 << 3 | 1][..], &[0; 8]].concat();
        let message = field(
            1,
            &[
                field(1, b"resource"),
                field(2, &[fixed, field(2, &span)].concat()),
            ]
            .concat(),
        );
        let spans = exported_spans(&message);
        assert_eq!(spans.len(), 1);
        assert_eq!(
            (spans[0].name.as_str(), spans[0].parent.as_str()),
            ("x", "")
        );
        assert_eq!(spans[0].trace, "01".repeat(16));
        assert!(spans[0].attributes.iter().eq(["key"]));
    }
}
