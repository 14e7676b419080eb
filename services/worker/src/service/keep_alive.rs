//! Empty lines in a chunk's response while the engine is silent: they show that the worker lives.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use actix_web::web::Bytes;
use futures_util::stream::{Stream, StreamExt};
use refrain_service_kit::deadline::Deadline;
use tokio::time::Instant;

/// Number of empty lines within the caller's timeout, so that a few of them may be late.
const LINES_PER_TIMEOUT: u32 = 4;

/// Shortest interval between empty lines. More of them would be traffic without information.
const INTERVAL_MIN: Duration = Duration::from_millis(50);

/// The lines of a stream, and empty lines while it is silent. The engine may be silent for minutes over a long
/// prompt, and without empty lines a caller could not tell that from a worker that has stopped.
pub(super) struct KeepAlive<S> {
    lines: S,
    /// The interval of empty lines, and when the next one is due.
    interval: Option<(Duration, Deadline)>,
}

impl<S> KeepAlive<S> {
    /// `timeout` is the silence after which the caller considers the worker lost; `None`: it sends no empty lines.
    pub(super) fn new(lines: S, timeout: Option<Duration>) -> Self {
        let interval = timeout.map(|timeout| (timeout / LINES_PER_TIMEOUT).max(INTERVAL_MIN));
        KeepAlive {
            lines,
            interval: interval.map(|interval| (interval, Deadline::after(interval))),
        }
    }
}

impl<E, S> Stream for KeepAlive<S>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    type Item = S::Item;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let line = this.lines.poll_next_unpin(context);
        let Some((interval, deadline)) = &mut this.interval else {
            return line;
        };
        if line.is_pending() && deadline.poll_due(context).is_pending() {
            return Poll::Pending;
        }
        deadline.set(Instant::now() + *interval);
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

    const TIMEOUT: Duration = Duration::from_millis(400);
    const INTERVAL: Duration = Duration::from_millis(100);

    type Lines = Result<Bytes, Infallible>;

    fn line(text: &'static str) -> Lines {
        Ok(Bytes::from_static(text.as_bytes()))
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_stream_has_empty_lines() {
        let (sender, receiver) = mpsc::channel::<Lines>(1);
        let mut lines = KeepAlive::new(ReceiverStream::new(receiver), Some(TIMEOUT));
        let start = Instant::now();
        for count in 1..=3 {
            assert_eq!(lines.next().await, Some(line("\n")));
            // The paused clock has a resolution of a millisecond.
            assert!(start.elapsed() >= count * INTERVAL);
            assert!(start.elapsed() < (count + 1) * INTERVAL);
        }
        // A line that is there goes first, however late it is, and the next empty line counts from it.
        tokio::time::sleep(2 * INTERVAL).await;
        sender.send(line("a line\n")).await.unwrap();
        let received = Instant::now();
        assert_eq!(lines.next().await, Some(line("a line\n")));
        assert_eq!(lines.next().await, Some(line("\n")));
        assert!(received.elapsed() >= INTERVAL);
        drop(sender);
        assert_eq!(lines.next().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_without_a_timeout_gets_no_empty_lines() {
        let (sender, receiver) = mpsc::channel::<Lines>(1);
        let mut lines = KeepAlive::new(ReceiverStream::new(receiver), None);
        let silent = tokio::time::timeout(100 * TIMEOUT, lines.next()).await;
        assert!(silent.is_err());
        drop(sender);
        assert_eq!(lines.next().await, None);
    }
}
