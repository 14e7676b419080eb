//! Messages of the stream that come once more, later and in another order.

use std::time::Duration;

use async_nats::ConnectOptions;
use async_nats::jetstream::{self, Context, stream::Stream};
use fastrand::Rng;

/// Messages that are sent again at once.
const MESSAGES: usize = 40;

/// Each is sent so often.
const COPIES: usize = 2;

const TIMEOUT: Duration = Duration::from_secs(5);

/// Sends some messages of a stream again, without the ids by which a broker drops repetitions. Returns how many the
/// broker has taken: none, if it has lost its quorum or is gone.
pub(crate) async fn redeliver(broker: &str, name: &str, rng: &mut Rng) -> usize {
    let options = ConnectOptions::new()
        .connection_timeout(TIMEOUT)
        .request_timeout(Some(TIMEOUT));
    let Ok(client) = options.connect(broker).await else {
        return 0;
    };
    let context = jetstream::new(client);
    match tokio::time::timeout(TIMEOUT, context.get_stream(name)).await {
        Ok(Ok(stream)) => again(&context, stream, rng).await,
        _ => 0,
    }
}

async fn again(context: &Context, mut stream: Stream, rng: &mut Rng) -> usize {
    let Ok(info) = stream.info().await else {
        return 0;
    };
    let (first, last) = (info.state.first_sequence, info.state.last_sequence);
    let mut messages = Vec::new();
    for _ in 0..MESSAGES {
        // Some were deleted with what was erased.
        let sequence = rng.u64(first..=last.max(first));
        if let Ok(message) = stream.get_raw_message(sequence).await {
            messages.extend(vec![(message.subject, message.payload); COPIES]);
        }
    }
    rng.shuffle(&mut messages);
    let mut taken = 0;
    for (subject, payload) in messages {
        let Ok(sent) = context.publish(subject, payload).await else {
            return taken;
        };
        match tokio::time::timeout(TIMEOUT, sent).await {
            Ok(Ok(_)) => taken += 1,
            _ => return taken,
        }
    }
    taken
}
