//! What a chunk's lines say while its engine says nothing: that the worker lives.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use actix_web::web::Bytes;
use futures_util::stream::{Stream, StreamExt};
use refrain_service_kit::deadline::Deadline;
use tokio::time::Instant;

/// Signs of life in the time after which a caller takes the worker for lost: a few may be late.
const SIGNS: u32 = 4;

/// Closer together they would be traffic and no news.
const EVERY_MIN: Duration = Duration::from_millis(50);

/// Lines, and empty ones where there are none for a while. The engine may be silent for minutes over a long prompt; a caller
/// that hears nothing else could not tell that from a worker that has stopped.
pub(crate) struct Alive<S> {
    lines: S,
    /// How long it may be silent, and until when by now.
    silence: Option<(Duration, Deadline)>,
}

impl<S> Alive<S> {
    /// `within`: when the caller takes a silent worker for lost; `None`: never.
    pub(crate) fn new(lines: S, within: Option<Duration>) -> Self {
        let every = within.map(|within| (within / SIGNS).max(EVERY_MIN));
        Alive {
            lines,
            silence: every.map(|every| (every, Deadline::after(every))),
        }
    }
}

impl<E, S> Stream for Alive<S>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    type Item = S::Item;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let line = this.lines.poll_next_unpin(context);
        let Some((every, deadline)) = &mut this.silence else {
            return line;
        };
        if line.is_pending() && deadline.poll_due(context).is_pending() {
            return Poll::Pending;
        }
        deadline.set(Instant::now() + *every);
        match line {
            Poll::Ready(line) => Poll::Ready(line),
            Poll::Pending => Poll::Ready(Some(Ok(Bytes::from_static(b"\n")))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use tokio::sync::mpsc;
    use tokio_stream::wrappers::ReceiverStream;

    use super::*;

    const WITHIN: Duration = Duration::from_millis(400);
    const EVERY: Duration = Duration::from_millis(100);

    type Line = Result<Bytes, Infallible>;

    fn line(text: &'static str) -> Line {
        Ok(Bytes::from_static(text.as_bytes()))
    }

    #[tokio::test]
    async fn a_silent_engines_worker_says_that_it_lives() {
        let (say, said) = mpsc::channel::<Line>(1);
        let mut alive = Alive::new(ReceiverStream::new(said), Some(WITHIN));
        let start = Instant::now();
        for signs in 1..=3 {
            assert_eq!(alive.next().await, Some(line("\n")));
            assert!(start.elapsed() >= signs * EVERY);
        }
        // A line that is there goes first, however late it is, and the next sign counts from it on.
        tokio::time::sleep(2 * EVERY).await;
        say.send(line("a line\n")).await.unwrap();
        let heard = Instant::now();
        assert_eq!(alive.next().await, Some(line("a line\n")));
        assert_eq!(alive.next().await, Some(line("\n")));
        assert!(heard.elapsed() >= EVERY);
        drop(say);
        assert_eq!(alive.next().await, None);
    }

    #[tokio::test]
    async fn whoever_does_not_ask_hears_lines_only() {
        let (say, said) = mpsc::channel::<Line>(1);
        let mut alive = Alive::new(ReceiverStream::new(said), None);
        let silent = tokio::time::timeout(2 * WITHIN, alive.next()).await;
        assert!(silent.is_err());
        drop(say);
        assert_eq!(alive.next().await, None);
    }
}
