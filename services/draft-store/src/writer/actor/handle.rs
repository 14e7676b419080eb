//! The writer as others reach it: calls that run on its thread, one after the other, between two commits.

use actix::prelude::SendError;
use actix::{Actor as _, Addr, Context, Handler, Message, Recipient};
use tokio::sync::oneshot;

use crate::writer::actor::WriterActor;

type Call = dyn FnOnce(&mut WriterActor, &mut Context<WriterActor>) + Send;

/// A call that waits in the writer's mailbox.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct WriterCall(Box<Call>);

impl Handler<WriterCall> for WriterActor {
    type Result = ();

    fn handle(&mut self, WriterCall(call): WriterCall, ctx: &mut Self::Context) {
        call(self, ctx);
    }
}

/// A handle of the writer. It is cheap to clone.
#[derive(Clone)]
pub(crate) struct WriterHandle(Recipient<WriterCall>);

impl From<Addr<WriterActor>> for WriterHandle {
    fn from(writer: Addr<WriterActor>) -> Self {
        WriterHandle(writer.recipient())
    }
}

/// Messages that the mailbox holds. Beyond it callers get 429.
const MAILBOX_MAX: usize = 1_024;

impl WriterHandle {
    /// Starts the writer in the actix system of this thread.
    pub(crate) fn start(writer: WriterActor) -> Self {
        let started = WriterActor::create(|ctx| {
            // Calls may come before the actor runs for the first time.
            ctx.set_mailbox_capacity(MAILBOX_MAX);
            writer
        });
        WriterHandle::from(started)
    }

    /// Whether the writer still runs.
    pub(crate) fn is_running(&self) -> bool {
        self.0.connected()
    }

    /// Sends a call, unless the mailbox is full.
    pub(crate) fn try_send(
        &self,
        call: impl FnOnce(&mut WriterActor, &mut Context<WriterActor>) + Send + 'static,
    ) -> Result<(), SendError<WriterCall>> {
        self.0.try_send(WriterCall(Box::new(call)))
    }

    /// Sends a call that must arrive: the mailbox takes it even when it is full. A caller sends one such call at a
    /// time.
    pub(crate) fn send(
        &self,
        call: impl FnOnce(&mut WriterActor, &mut Context<WriterActor>) + Send + 'static,
    ) {
        self.0.do_send(WriterCall(Box::new(call)));
    }

    /// Sends a call that must arrive. The receiver gets its answer.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut WriterActor) -> T + Send + 'static,
    ) -> oneshot::Receiver<T> {
        let (reply, answer) = oneshot::channel();
        self.send(move |writer, _| {
            let _ = reply.send(call(writer));
        });
        answer
    }
}
