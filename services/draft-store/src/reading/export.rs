//! Exporting one moment of a tenant's documents, page by page; see `catalog/exports.rs`.

use std::sync::Arc;

use refrain_protocol::admin::{ExportCursor, ExportReply, ExportRequest, ExportedDocument};
use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::{ApiError, DocumentId, ErrorKind, Namespace, NamespaceId};

use crate::catalog::{ExportEnd, ExportLimits, ExportSnapshot, ExportSource, Exports, as_of};
use crate::codec::Damage;
use crate::metrics::Limit;
use crate::reading::document_text::{TextError, read_document};
use crate::record::{DocumentKey, StateRecord, finish_of};
use crate::shared_store::{SharedStore, unavailable};

/// Why there is no page, and the limit that was reached, if any.
pub(crate) struct ExportRefusal {
    pub(crate) limit: Option<Limit>,
    pub(crate) error: Box<ApiError>,
}

impl From<ApiError> for ExportRefusal {
    fn from(error: ApiError) -> Self {
        ExportRefusal {
            limit: None,
            error: Box::new(error),
        }
    }
}

fn ended(why: ExportEnd) -> ExportRefusal {
    let (limit, why) = match why {
        ExportEnd::List => {
            let message = "the list of documents is too large for one export (export_held_bytes_max): \
                           export one model at a time, or raise the limit";
            return ExportRefusal {
                limit: Some(Limit::ExportHeld),
                error: Box::new(ApiError::new(ErrorKind::TooLarge, message)),
            };
        }
        ExportEnd::Erased => (None, "some of its documents were erased"),
        ExportEnd::Held => (
            Some(Limit::ExportHeld),
            "too many documents changed meanwhile (export_held_bytes_max)",
        ),
        ExportEnd::Disk => (
            Some(Limit::ExportDisk),
            "too many segments were replaced meanwhile (export_disk_bytes_max)",
        ),
    };
    let message = format!("the export has ended: {why}; start it again");
    let error = Box::new(ApiError::new(ErrorKind::Conflict, message));
    ExportRefusal { limit, error }
}

/// A page of a tenant's documents as they were when the first page was requested. It holds at least one document if
/// there is one, and at most `tokens_max` tokens unless the first document has more.
///
/// Blocks on the disk and on the writer, so call it from blocking threads only.
pub(crate) fn page(
    shared: &SharedStore,
    request: &ExportRequest,
    tokens_max: usize,
    limits: ExportLimits,
) -> Result<ExportReply, ExportRefusal> {
    let (number, snapshot) = find_or_begin(shared, request, limits)?;
    let mut after = ExportCursor {
        snapshot: number,
        ..request.after
    };
    let mut reply = ExportReply::default();
    let mut tokens = 0;
    let from = snapshot
        .namespaces
        .partition_point(|listed| listed.namespace < after.namespace);
    'namespaces: for listed in &snapshot.namespaces[from..] {
        if listed.namespace != after.namespace {
            (after.namespace, after.sequence) = (listed.namespace, 0);
        }
        let order = listed.order();
        let from = order.partition_point(|(sequence, _)| *sequence <= after.sequence);
        for &(sequence, source) in &order[from..] {
            let read = match source {
                ExportSource::Sealed(segment, number) => listed
                    .segment(segment)
                    .ok_or(Damage::Short)
                    .and_then(|sealed| sealed.entry(number))
                    .map(|entry| DocumentUpdate {
                        document: entry.document,
                        epoch: entry.state.epoch,
                        prev_len: 0,
                        tokens: entry.tokens,
                        head: entry.head,
                        finish: finish_of(entry.state.finish),
                    })
                    .map_err(TextError::from),
                ExportSource::Unsealed(at) => {
                    unsealed(shared, &snapshot, listed.namespace, listed.document(at))?
                }
            };
            match read {
                Ok(update) => {
                    if !reply.documents.is_empty() && tokens + update.tokens.len() > tokens_max {
                        reply.next = Some(after);
                        break 'namespaces;
                    }
                    tokens += update.tokens.len();
                    reply.documents.push(ExportedDocument {
                        namespace: listed.names.clone(),
                        update,
                    });
                }
                // `verify` reports it.
                Err(TextError::Damaged(_)) => {}
                Err(TextError::Log(error)) => return Err(unavailable().with_detail(error).into()),
            }
            after.sequence = sequence;
        }
    }
    // If the export ended meanwhile, the page may be wrong.
    let open = shared.read()?;
    let exports = &open.catalog.exports;
    find_running(exports, number)?;
    if reply.next.is_none() {
        exports.forget(number);
    }
    Ok(reply)
}

fn find_running(exports: &Exports, number: u64) -> Result<Arc<ExportSnapshot>, ExportRefusal> {
    match exports.get(number) {
        Some(Ok(snapshot)) => Ok(snapshot),
        Some(Err(why)) => {
            exports.forget(number);
            Err(ended(why))
        }
        None => {
            let message = "no such export (any more): nobody asked for it for a while (export_idle_s), \
                           or the store was opened again; begin again";
            Err(ApiError::new(ErrorKind::Conflict, message).into())
        }
    }
}

/// The requested export. It begins now if the cursor names none.
fn find_or_begin(
    shared: &SharedStore,
    request: &ExportRequest,
    limits: ExportLimits,
) -> Result<(u64, Arc<ExportSnapshot>), ExportRefusal> {
    let begun = request.after.snapshot;
    let number = match begun {
        // Whoever exports several stores puts the number of the store beside it, so it is a small one.
        0 => u64::from(getrandom::u32().map_err(ApiError::internal)?).max(1),
        begun => begun,
    };
    // The lock for reading keeps commits out of the list.
    let open = shared.read()?;
    let catalog = &open.catalog;
    if begun != 0 {
        return Ok((number, find_running(&catalog.exports, number)?));
    }
    let is_wanted = |names: &Namespace| {
        let model = request.model.as_ref();
        names.is_of(&request.tenant) && model.is_none_or(|model| *model == names.model)
    };
    match catalog.begin_export(number, is_wanted, limits) {
        Some(begun) => Ok((number, begun.map_err(ended)?)),
        None => {
            let message = "too many exports are in progress (exports_max); try again later";
            let error = ApiError::new(ErrorKind::Overloaded, message).with_retry_after_ms(10_000);
            Err(ExportRefusal {
                limit: Some(Limit::Exports),
                error: Box::new(error),
            })
        }
    }
}

/// A document that was in the log: its copy if it was put aside, otherwise its current text up to the listed length.
fn unsealed(
    shared: &SharedStore,
    snapshot: &ExportSnapshot,
    namespace: NamespaceId,
    listed: Option<(DocumentId, StateRecord)>,
) -> Result<Result<DocumentUpdate, TextError>, ApiError> {
    let Some((document, then)) = listed else {
        return Ok(Err(Damage::Short.into()));
    };
    let key = DocumentKey::new(namespace, document);
    // The lock for reading: a commit that cuts or removes the document runs before or after.
    let open = shared.read()?;
    if let Some(update) = snapshot.put_aside(key) {
        return Ok(Ok(update));
    }
    Ok(read_document(&open, key).map(|now| as_of(now, &then)))
}
