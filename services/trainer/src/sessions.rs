//! Sessions: agents talk by chat, and the trainer gets the exact tokens of all that was said.
//!
//! An agent sends the whole conversation with each turn, as every client of a chat does. Here its prompt is not
//! rendered anew: it is the tokens of the turn before, which the model saw and sampled, and behind them what the
//! template writes for the new messages. A history that was edited goes on from the last turn that is still in it.
//!
//! | file | what it has |
//! |---|---|
//! | `turns.rs` | the turns of a session, and the trajectories that they make; read this first |
//! | `digests.rs` | which messages are the same as those of an earlier turn |
//! | `known_session.rs` | the prompt of the next turn |
//! | `recorder.rs` | the output of a turn |
//! | `session.rs`, `session_file.rs` | a session in memory, and on disk |
//! | `table.rs` | all sessions, with their limits |

mod digests;
mod known_session;
mod recorder;
mod session;
mod session_file;
mod table;
mod turns;

pub(super) use known_session::KnownSession;
pub(super) use recorder::Recorder;
pub(super) use table::{SESSIONS_LIMIT, SessionTable};
pub(super) use turns::{Trajectory, Turn, TurnFigures, Turns};
