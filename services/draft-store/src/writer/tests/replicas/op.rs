//! The random calls.

use proptest::prelude::*;

use super::{READERS, REPLICAS};

#[derive(Clone, Debug)]
pub(super) enum Op {
    Append {
        replica: usize,
        document: u128,
        epoch: u64,
        prev_len: u32,
        count: u32,
        /// A faulty writer, whose text differs from that of others.
        salt: u32,
        finish: bool,
        session: bool,
        age_ms: u64,
    },
    /// Continues a document where it ends.
    Grow {
        replica: usize,
        document: u128,
        count: u32,
        finish: bool,
    },
    /// Reads entries of the outbox, which are then on the way.
    Read {
        replica: usize,
        count: usize,
    },
    /// The message that is longest on the way arrives at the broker.
    Arrive {
        replica: usize,
    },
    /// The broker's acknowledgement arrives, or it is lost, with or without the message.
    Acknowledge {
        replica: usize,
        arrives: bool,
    },
    /// Applies messages, some of them again.
    Apply {
        replica: usize,
        count: usize,
        again: usize,
    },
    Evict {
        replica: usize,
        document: u128,
    },
    Erase {
        replica: usize,
        session: bool,
        span: Option<(u64, u64)>,
    },
    CarryOut {
        replica: usize,
    },
    Release {
        replica: usize,
    },
    Tick {
        replica: usize,
        elapsed_ms: u64,
    },
    Seal {
        replica: usize,
    },
    Reopen {
        replica: usize,
    },
    /// Copies all files of a replica.
    Save {
        replica: usize,
    },
    /// Brings the last copy back, in place of the files.
    Restore {
        replica: usize,
    },
    /// Takes over the documents of another replica, as if the stream had lost what came before.
    Join {
        replica: usize,
        peer: usize,
        /// Applied by the peer while its documents are read.
        meanwhile: usize,
        /// The replica lost its disk before, unless something on it was not sent.
        is_new: bool,
        /// A document that a caller of the replica begins while files are on their way.
        appended: Option<u128>,
    },
    /// A reader reads on where it is.
    Follow {
        reader: usize,
        tokens_max: usize,
    },
    /// A reader goes on at another replica.
    Move {
        reader: usize,
        replica: usize,
    },
}

pub(super) fn op() -> impl Strategy<Value = Op> {
    let replica = || 0usize..REPLICAS;
    let document = || 0u128..4;
    prop_oneof![
        8 => (replica(), document(), 1u64..4, 0u32..12, 0u32..12, 0u32..8, any::<bool>(), any::<bool>(), 0u64..50)
            .prop_map(|(replica, document, epoch, prev_len, count, salt, finish, session, age_ms)| {
                let salt = salt / 7;
                Op::Append { replica, document, epoch, prev_len, count, salt, finish, session, age_ms }
            }),
        10 => (replica(), document(), 1u32..20, any::<bool>())
            .prop_map(|(replica, document, count, finish)| Op::Grow { replica, document, count, finish }),
        8 => (replica(), 1usize..4).prop_map(|(replica, count)| Op::Read { replica, count }),
        20 => replica().prop_map(|replica| Op::Arrive { replica }),
        10 => (replica(), prop::bool::weighted(0.7))
            .prop_map(|(replica, arrives)| Op::Acknowledge { replica, arrives }),
        10 => (replica(), 1usize..5, 0usize..4)
            .prop_map(|(replica, count, again)| Op::Apply { replica, count, again }),
        2 => (replica(), document()).prop_map(|(replica, document)| Op::Evict { replica, document }),
        1 => (replica(), any::<bool>(), proptest::option::of((0u64..40, 1u64..40)))
            .prop_map(|(replica, session, span)| Op::Erase { replica, session, span }),
        2 => replica().prop_map(|replica| Op::CarryOut { replica }),
        3 => replica().prop_map(|replica| Op::Release { replica }),
        3 => (replica(), 1u64..30).prop_map(|(replica, elapsed_ms)| Op::Tick { replica, elapsed_ms }),
        1 => (replica(), 200u64..300).prop_map(|(replica, elapsed_ms)| Op::Tick { replica, elapsed_ms }),
        1 => replica().prop_map(|replica| Op::Seal { replica }),
        2 => replica().prop_map(|replica| Op::Reopen { replica }),
        2 => replica().prop_map(|replica| Op::Save { replica }),
        2 => replica().prop_map(|replica| Op::Restore { replica }),
        3 => (replica(), replica(), 0usize..4, any::<bool>(), proptest::option::of(document()))
            .prop_map(|(replica, peer, meanwhile, is_new, appended)| {
                Op::Join { replica, peer, meanwhile, is_new, appended }
            }),
        8 => (0..READERS, 1usize..40).prop_map(|(reader, tokens_max)| Op::Follow { reader, tokens_max }),
        2 => (0..READERS, replica()).prop_map(|(reader, replica)| Op::Move { reader, replica }),
    ]
}
