//! Measures the cost of the hashes of a context's prefixes: `cargo bench -p refrain-protocol`.

use divan::{Bencher, black_box};
use refrain_protocol::prefix::PrefixHasher;
use refrain_protocol::{NamespaceId, TokenId};

fn main() {
    divan::main();
}

fn context(len: usize) -> Vec<TokenId> {
    (0..len as TokenId)
        .map(|token| token.wrapping_mul(2_654_435_761) % 151_936)
        .collect()
}

fn hasher_of(context: &[TokenId]) -> PrefixHasher {
    let mut hasher = PrefixHasher::new(&NamespaceId(1));
    hasher.extend(context);
    hasher
}

/// All hashes of a prompt.
#[divan::bench(args = [1_000, 10_000, 50_000])]
fn prompt(bencher: Bencher<'_, '_>, len: usize) {
    let context = context(len);
    bencher.bench_local(|| hasher_of(black_box(&context)).hashes().len());
}

/// The cost of a further chunk of 2,048 tokens behind a prompt, with the copy of the hashes for the call.
#[divan::bench(args = [1_000, 10_000, 50_000])]
fn chunk(bencher: Bencher<'_, '_>, len: usize) {
    let hashed = hasher_of(&context(len));
    let chunk = context(2_048);
    bencher
        .with_inputs(|| hashed.clone())
        .bench_local_values(|mut hasher| {
            hasher.extend(black_box(&chunk));
            hasher.hashes().to_vec()
        });
}
