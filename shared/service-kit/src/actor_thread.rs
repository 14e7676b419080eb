//! A thread for an actor, with an actix system of its own. Its callers need no actix system, the actor may block, and
//! the work of its callers does not hold it up.

use std::thread::JoinHandle;

use actix_web::rt::System;
use anyhow::Context as _;
use tokio::sync::oneshot;

/// The thread of an actor. Both end when this is stopped or dropped.
pub struct ActorThread {
    name: &'static str,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl ActorThread {
    /// Starts a thread called `name` and runs `begin` there, which starts the actor. Returns the result of `begin`,
    /// usually the actor's address.
    ///
    /// # Errors
    /// `begin` fails, or the system refuses a thread.
    pub async fn start<A: Send + 'static>(
        name: &'static str,
        begin: impl FnOnce() -> anyhow::Result<A> + Send + 'static,
    ) -> anyhow::Result<(Self, A)> {
        let (stop, stopped) = oneshot::channel();
        let (started, outcome) = oneshot::channel();
        let run = move || {
            let system = System::new();
            let runtime = system.block_on(async move {
                let begun = begin();
                let runs = begun.is_ok();
                // If either end is dropped, nobody needs the actor any more.
                if started.send(begun).is_ok() && runs {
                    let _ = stopped.await;
                }
                tokio::runtime::Handle::current()
            });
            // An actor is run once more when it is dropped, and may set its timers only then.
            let _entered = runtime.enter();
            drop(system);
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(run)
            .with_context(|| format!("cannot start the thread {name}"))?;
        let address = outcome
            .await
            .with_context(|| format!("the thread {name} ended before its actor began"))??;
        Ok((ActorThread { name, stop, thread }, address))
    }

    /// Ends the thread and waits until it has ended.
    pub async fn stop(self) {
        drop(self.stop);
        let joined = tokio::task::spawn_blocking(move || self.thread.join()).await;
        if !matches!(joined, Ok(Ok(()))) {
            tracing::error!(thread = self.name, "the thread of an actor panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::ThreadId;

    use super::*;

    #[tokio::test]
    async fn an_actor_runs_until_its_thread_is_stopped() {
        let (ended, has_ended) = std::sync::mpsc::channel();
        let begin = move || {
            actix_web::rt::spawn(async move {
                // It is dropped with the actix system of the thread.
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

    /// Sets a timer when it is dropped, as an actor does that was not run before.
    struct SetsTimer(std::sync::mpsc::Sender<()>);

    impl Drop for SetsTimer {
        fn drop(&mut self) {
            drop(tokio::time::sleep(std::time::Duration::from_secs(1)));
            let _ = self.0.send(());
        }
    }

    #[tokio::test]
    async fn an_actor_that_is_dropped_may_set_timers() {
        let (set, is_set) = std::sync::mpsc::channel();
        let begin = move || {
            let timer = SetsTimer(set);
            actix_web::rt::spawn(async move {
                let _timer = timer;
                std::future::pending::<()>().await;
            });
            Ok(())
        };
        let (thread, ()) = ActorThread::start("a-test", begin).await.unwrap();
        thread.stop().await;
        assert_eq!(is_set.recv(), Ok(()), "it panicked before");
    }

    #[tokio::test]
    async fn an_actor_that_does_not_start_is_an_error() {
        let refused = ActorThread::start::<()>("a-test", || anyhow::bail!("no disk")).await;
        assert_eq!(refused.err().unwrap().to_string(), "no disk");
        let panics = ActorThread::start::<()>("a-test", || std::panic::resume_unwind(Box::new(())));
        let error = panics.await.err().unwrap().to_string();
        assert!(error.contains("a-test"), "{error}");
    }
}
