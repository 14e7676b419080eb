//! A fuzz target of all formats.

use super::chunkings::{KINDS, assert_parses};
use super::options;
use super::work::around;
use crate::{Delivery, ReasoningParserKind};

/// Any output, cut in any way, gives the same events without a panic, and no text is lost.
///
/// `cargo test` runs this for a second, and `cargo bolero test -p refrain-output-parsers
/// tests::fuzz::outputs_are_parsed_alike_in_all_chunks` runs it for as long as wanted, guided by coverage.
#[test]
fn outputs_are_parsed_alike_in_all_chunks() {
    bolero::check!()
        .with_type::<(u8, u8, Vec<u8>, Vec<u8>)>()
        .with_max_len(256)
        .for_each(|(kind, flags, bytes, edits)| {
            let kind = KINDS[usize::from(*kind) % KINDS.len()];
            let mut options = options(kind);
            if flags & 1 == 1 {
                options.delivery = Delivery::Whole;
            }
            if flags & 2 == 2 {
                options.reasoning_as = ReasoningParserKind::Qwen3;
            }
            options.first_call_only = flags & 4 == 4;
            // A call with arbitrary text in it, and some of its characters changed.
            let (begin, end) = around(kind);
            let inner = String::from_utf8_lossy(bytes);
            let mut output: Vec<char> = format!("{begin}{inner}{end}{begin}").chars().collect();
            for edit in edits.chunks_exact(2) {
                let at = usize::from(edit[0]) % output.len().max(1);
                if let Some(place) = output.get_mut(at) {
                    *place = char::from(edit[1]);
                }
            }
            let output: String = output.into_iter().collect();
            let size = usize::from(flags >> 4) + 1;
            assert_parses(
                &options,
                &output,
                &[size, 1, 5],
                usize::from(flags >> 6) + 1,
            );
        });
}
