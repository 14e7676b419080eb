//! The feed of a replica: what connects its store to the stream of its shard. docs/replication.md has the design.
//!
//! The store itself needs no broker: commits fill an outbox (`catalog/outbox.rs`), and the writer applies messages
//! (`writer/replication.rs`). This module carries both ways, in *sessions*. A session lasts as long as one connection
//! to the broker. It opens the stream, applies what came since the replica's position, and only then sends. Whatever
//! goes wrong ends the session, and the next one begins from what is on disk.
//!
//! * `run.rs` runs sessions, one after the other; `session.rs` is the store as they see it
//! * `stream.rs` has the connection and the stream with its limits
//! * `follow.rs` applies messages, `publish.rs` sends the outbox
//! * `join.rs` takes over what the stream does not have any more; `join_files.rs` does so by files, `joining.rs` has
//!   the calls, `pace.rs` their rate, and `adopted_files.rs` what is done if one breaks off
//! * `erasures.rs` carries out erasures of the stream
//! * `announce.rs` tells the other replicas of this one

pub(crate) mod adopted_files;
mod announce;
mod erasures;
mod follow;
mod join;
mod join_files;
mod joining;
mod pace;
mod publish;
pub(crate) mod run;
pub(crate) mod session;
mod stream;
