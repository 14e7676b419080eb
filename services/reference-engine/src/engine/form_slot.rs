//! The form of a session, in its place or with a thread that works on it.

use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};

use refrain_output_grammar::{GrammarCompiler, StopSignal};
use refrain_protocol::TenantId;

use super::session_form::SessionForm;

/// The form of a session.
#[derive(Debug)]
pub(crate) enum FormSlot {
    Here(Box<SessionForm>),
    Away(AwayForm),
    /// The thread that worked on it has lost it.
    Lost,
}

/// A form that a thread works on. Dropped, it ends the work: nobody wants it any longer.
#[derive(Debug)]
pub(crate) struct AwayForm {
    back: Receiver<Box<SessionForm>>,
    stop: Option<StopSignal>,
}

impl Drop for AwayForm {
    fn drop(&mut self) {
        self.stop.iter().for_each(StopSignal::set);
    }
}

impl FormSlot {
    pub(super) fn new(form: SessionForm) -> Self {
        FormSlot::Here(Box::new(form))
    }

    /// The form, if it is in its place.
    pub(super) fn here(&mut self) -> Option<&mut SessionForm> {
        match self {
            FormSlot::Here(form) => Some(form),
            FormSlot::Away(_) | FormSlot::Lost => None,
        }
    }

    /// Whether the thread that worked on the form has lost it.
    pub(super) fn is_lost(&self) -> bool {
        matches!(self, FormSlot::Lost)
    }

    /// Takes the form back if the work is done. Returns whether it is still away.
    pub(super) fn is_away(&mut self) -> bool {
        let FormSlot::Away(away) = self else {
            return false;
        };
        let slot = match away.back.try_recv() {
            Err(TryRecvError::Empty) => return true,
            Err(TryRecvError::Disconnected) => FormSlot::Lost,
            Ok(form) => FormSlot::Here(form),
        };
        away.stop = None;
        *self = slot;
        false
    }

    /// Has a thread work on the form, if it has work that no step should wait for. Returns whether it has.
    pub(super) fn leave(&mut self, tenant: TenantId, grammars: &GrammarCompiler) -> bool {
        match self {
            FormSlot::Here(form) if form.must_leave() => {}
            FormSlot::Here(_) | FormSlot::Lost => return false,
            FormSlot::Away(_) => return true,
        }
        let (sender, back) = sync_channel(1);
        let FormSlot::Here(mut form) = std::mem::replace(self, FormSlot::Lost) else {
            return false;
        };
        let stop = Some(form.stop_signal());
        *self = FormSlot::Away(AwayForm { back, stop });
        let work = Box::new(move || {
            form.prepare();
            // The session may have ended meanwhile.
            let _ = sender.send(form);
        });
        if let Err(work) = grammars.work(tenant, work) {
            work();
        }
        true
    }
}

#[cfg(test)]
impl FormSlot {
    /// The signal that ends the work on a form that is away.
    pub(crate) fn stop_of_away(&self) -> Option<StopSignal> {
        match self {
            FormSlot::Away(away) => away.stop.clone(),
            _ => None,
        }
    }
}
