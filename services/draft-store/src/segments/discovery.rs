//! Finding the segments in use when a directory is opened.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use refrain_protocol::NamespaceId;

use crate::codec;
use crate::log::{LogError, RecordLog};
use crate::record::{RecordKind, SegmentId, SegmentRecord, segment_of};
use crate::segments::file::SegmentFile;
use crate::segments::paths::list;

/// The segments of a directory.
#[derive(Default)]
pub(crate) struct FoundSegments {
    /// Segments in use.
    pub(crate) in_use: Vec<Arc<SegmentFile>>,
    /// Segments among them that the log does not name.
    pub(crate) adopted: Vec<SegmentId>,
    /// Segments whose file is missing or damaged, with the namespace if the log tells it.
    pub(crate) lost: Vec<(SegmentId, Option<NamespaceId>)>,
    /// Names of segments in the log that could not be read.
    pub(crate) damaged_records: u64,
}

/// Opens the segments that the log names, and with `adopts` all others, too. A log that lost something may have lost
/// their names, and a document that comes back from a merged segment costs little.
///
/// # Errors
/// The disk refuses, or a file has another version. A missing or damaged file is no error.
pub(crate) fn find(
    dir: &Path,
    log: &dyn RecordLog,
    adopts: bool,
) -> Result<FoundSegments, LogError> {
    let mut found = FoundSegments::default();
    let mut named: BTreeMap<SegmentId, Option<SegmentRecord>> = BTreeMap::new();
    let (from, to) = RecordKind::Segment.range();
    log.scan(&from, &to, &mut |key, value| {
        let record = codec::open(key, value);
        found.damaged_records += u64::from(record.is_err());
        if let Some(segment) = segment_of(key) {
            named.insert(segment, record.ok());
        }
        true
    })?;
    if adopts {
        for segment in list(dir)?.0 {
            named.entry(segment).or_insert(None);
        }
    }
    for (segment, record) in named {
        let opened = SegmentFile::open(dir, segment).and_then(|sealed| match record {
            Some(record) if record != sealed.manifest() => Err(LogError::Corrupt(
                "it is not the file that the log names".into(),
            )),
            _ => Ok(sealed),
        });
        match opened {
            Ok(sealed) => {
                if record.is_none() {
                    found.adopted.push(segment);
                }
                found.in_use.push(Arc::new(sealed));
            }
            Err(LogError::Corrupt(why)) => {
                tracing::error!(segment, why, "draft store segment lost");
                let namespace = record.map(|record| NamespaceId(record.namespace));
                found.lost.push((segment, namespace));
            }
            Err(refused) => return Err(refused),
        }
    }
    Ok(found)
}
