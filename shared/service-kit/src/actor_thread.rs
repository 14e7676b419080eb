//! A thread for an actor, with an actix system of its own: callers then need none, the actor may block, and nothing of
//! theirs holds it up.

use std::thread::JoinHandle;

use actix_web::rt::System;
use anyhow::Context as _;
use tokio::sync::oneshot;

/// The thread. It ends, and the actor with it, when this is stopped or dropped.
pub struct ActorThread {
    name: &'static str,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl ActorThread {
    /// Starts a thread of this name, and has `begin` start the actor there. Answers with what that answers: its address.
    ///
    /// # Errors
    /// What `begin` fails with, or no thread can be had.
    pub async fn start<A: Send + 'static>(
        name: &'static str,
        begin: impl FnOnce() -> anyhow::Result<A> + Send + 'static,
    ) -> anyhow::Result<(Self, A)> {
        let (stop, stopped) = oneshot::channel();
        let (started, outcome) = oneshot::channel();
        let run = move || {
            System::new().block_on(async move {
                let begun = begin();
                let runs = begun.is_ok();
                // Either end going away means that the actor is not wanted any more.
                if started.send(begun).is_ok() && runs {
                    let _ = stopped.await;
                }
            });
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(run)
            .with_context(|| format!("the thread {name} cannot be started"))?;
        let address = outcome
            .await
            .with_context(|| format!("the thread {name} ended before its actor began"))??;
        Ok((ActorThread { name, stop, thread }, address))
    }

    /// Ends it, and waits until it has ended.
    pub async fn stop(self) {
        drop(self.stop);
        let joined = tokio::task::spawn_blocking(move || self.thread.join()).await;
        if !matches!(joined, Ok(Ok(()))) {
            tracing::error!(thread = self.name, "an actor's thread panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::ThreadId;

    use super::*;

    #[tokio::test]
    async fn what_begins_there_runs_until_it_is_stopped() {
        let (ended, has_ended) = std::sync::mpsc::channel();
        let begin = move || {
            actix_web::rt::spawn(async move {
                // Dropped with the thread's system.
                let _ended: std::sync::mpsc::Sender<()> = ended;
                std::future::pending::<()>().await;
            });
            Ok(std::thread::current().id())
        };
        let (thread, id): (ActorThread, ThreadId) =
            ActorThread::start("a-test", begin).await.unwrap();
        assert_ne!(id, std::thread::current().id());
        let still = std::sync::mpsc::TryRecvError::Empty;
        assert_eq!(has_ended.try_recv(), Err(still));
        thread.stop().await;
        let gone = std::sync::mpsc::TryRecvError::Disconnected;
        assert_eq!(has_ended.try_recv(), Err(gone));
    }

    #[tokio::test]
    async fn what_does_not_begin_is_told() {
        let refused = ActorThread::start::<()>("a-test", || anyhow::bail!("no disk")).await;
        assert_eq!(refused.err().unwrap().to_string(), "no disk");
        let panics = ActorThread::start::<()>("a-test", || std::panic::resume_unwind(Box::new(())));
        let told = panics.await.err().unwrap().to_string();
        assert!(told.contains("a-test"), "{told}");
    }
}
