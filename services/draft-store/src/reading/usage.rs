//! Reading rows of usage, page by page.

use refrain_protocol::ApiError;
use refrain_protocol::usage::{UsageRow, UsageRowId, UsageRowsReply, UsageRowsRequest, UsageTotal};

use crate::codec;
use crate::record::usage::{UsageRecord, usage_hour_key, usage_key, usage_of};
use crate::shared_store::{SharedStore, unavailable};

/// Most rows of one answer, whatever the caller asks for.
const ROWS_MAX: usize = 4_096;

/// Rows that are looked at for one answer. A page for one tenant may pass over many others.
const VISITS_MAX: usize = 65_536;

/// Rows that are looked at while no commit can happen.
const VISITS_PER_LOCK: usize = 2_048;

/// A page of rows. A damaged row is left out; `refrain store verify` finds it.
///
/// Blocks on the disk and on the writer, so call it from blocking threads only.
///
/// # Errors
/// The store is closed, or its log cannot be read.
pub(crate) fn page(
    shared: &SharedStore,
    request: &UsageRowsRequest,
) -> Result<UsageRowsReply, ApiError> {
    let rows_max = (request.rows_max as usize).clamp(1, ROWS_MAX);
    let above = usage_hour_key(request.until_hour);
    let mut from = match &request.after {
        Some(after) => [&*usage_key(after), &[0]].concat(),
        None => usage_hour_key(request.from_hour),
    };
    let mut reply = UsageRowsReply::default();
    let mut visits = 0;
    while from < above {
        let (mut visits_left, mut last) = (VISITS_PER_LOCK, None);
        let open = shared.read()?;
        let scanned = open.log.scan(&from, &above, &mut |key, value| {
            let total = codec::open::<UsageRecord>(key, value).map(UsageTotal::from);
            if let (Some(id), Ok(total)) = (usage_of(key), total)
                && is_wanted(request, &id)
            {
                reply.rows.push(UsageRow { id, total });
            }
            visits_left -= 1;
            last = Some(key.to_vec());
            visits_left > 0 && reply.rows.len() < rows_max
        });
        drop(open);
        scanned.map_err(|error| unavailable().with_detail(error))?;
        visits += VISITS_PER_LOCK;
        // Without an early end all rows were seen.
        let Some(last) = last.filter(|_| visits_left == 0 || reply.rows.len() >= rows_max) else {
            break;
        };
        from = [&*last, &[0]].concat();
        if reply.rows.len() >= rows_max || visits >= VISITS_MAX {
            reply.next = usage_of(&last);
            break;
        }
    }
    Ok(reply)
}

fn is_wanted(request: &UsageRowsRequest, id: &UsageRowId) -> bool {
    let is_one =
        |wanted: &Option<String>, name: &str| wanted.as_deref().is_none_or(|one| one == name);
    is_one(&request.tenant, &id.tenant)
        && is_one(&request.key, &id.key)
        && is_one(&request.model, &id.model)
}
