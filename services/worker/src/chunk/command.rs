//! The commands to a driver.

use refrain_protocol::LeaseId;
use refrain_protocol::chunk::ChunkCut;
use tokio::sync::{mpsc, oneshot};

use super::active::ActiveChunk;
use crate::shared::Shared;

/// A command to the driver that decodes.
pub(crate) enum Command {
    /// Decode a chunk.
    Start(Box<ActiveChunk>),
    /// Shorten an output: its reader needs no more of it. The sender reports that this is done.
    Cut(ChunkCut, oneshot::Sender<()>),
    /// End all chunks, since the worker drains. Their requests go on at other workers.
    Evacuate,
    /// End these chunks for now, since other tenants wait for a slot.
    GiveWay(Vec<LeaseId>),
    /// End as soon as the running chunks have ended. No chunk begins after this.
    End,
}

/// After the last chunk has ended, keeps answering [`Command::Cut`] until `last` completes: readers may still shorten
/// the outputs that they received last.
pub(crate) async fn serve_cuts(
    mut commands: mpsc::Receiver<Command>,
    shared: &Shared,
    last: impl Future<Output = ()>,
) {
    let serve = |command| {
        if let Command::Cut(cut, done) = command {
            shared.cut_ended(cut);
            let _ = done.send(());
        }
    };
    let mut last = std::pin::pin!(last);
    loop {
        tokio::select! {
            () = &mut last => break,
            Some(command) = commands.recv() => serve(command),
        }
    }
    // Later senders receive an error.
    commands.close();
    while let Ok(command) = commands.try_recv() {
        serve(command);
    }
}
