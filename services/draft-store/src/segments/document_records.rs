//! The packed records of a segment: everything known about its documents besides their text.
//!
//! Each document has thirteen numbers, and each number has a column over all documents. Names are numbers of a table.
//! A column is as wide as its widest number, so a value that all documents share costs nothing, and a time costs its
//! difference from the others. The last two are the halves of the hash of its prompt, 0 where that is not known.
//! Files of version 2 do not have them. The index holds lengths and left contexts.

use std::collections::BTreeSet;

use refrain_protocol::TokenId;
use refrain_protocol::document::DocumentHead;
use refrain_protocol::history::PromptHash;

use crate::codec::Damage;
use crate::record::StateRecord;
use crate::segments::entry::SegmentEntry;
use crate::segments::layout::FileVersion;
use crate::segments::name_table::{self, NameTable};
use crate::segments::packed_columns::{self, PackedColumn};

const COLUMNS: usize = 13;

/// Columns of files of version 2, which know no prompts.
const COLUMNS_V2: usize = 11;

/// The difference of `time` from `from`, encoded so that it is small if the two are close.
fn apart(time: u64, from: u64) -> u64 {
    let difference = time.wrapping_sub(from) as i64;
    ((difference << 1) ^ (difference >> 63)) as u64
}

/// The time whose difference from `from` was encoded by [`apart`].
fn beside(apart: u64, from: u64) -> u64 {
    let difference = (apart >> 1) as i64 ^ -((apart & 1) as i64);
    from.wrapping_add(difference as u64)
}

/// The numbers of a document. `number` maps a name to its number in the table.
fn numbers(entry: &SegmentEntry, number: impl Fn(&str) -> u64) -> [u64; COLUMNS] {
    let SegmentEntry { state, head, .. } = entry;
    let prompt = head.prompt_hash.map_or(0, |PromptHash(hash)| hash);
    let name = |name: &Option<String>| name.as_deref().map_or(0, |name| 1 + number(name));
    [
        state.epoch,
        u64::from(state.epoch_start),
        u64::from(state.finish),
        state.sequence,
        state.stored_ms,
        apart(state.used_ms, state.stored_ms),
        name(&head.session),
        name(&head.group),
        u64::from(head.choice),
        head.weight_version,
        apart(head.created_ms, state.stored_ms),
        prompt as u64,
        (prompt >> 64) as u64,
    ]
}

/// Packs the records of documents, in this order.
///
/// # Errors
/// A name that is far longer than any that is accepted.
pub(super) fn pack(entries: &[SegmentEntry]) -> Result<Vec<u8>, Damage> {
    let heads = entries.iter().map(|entry| &entry.head);
    let named: BTreeSet<&str> = heads
        .flat_map(|head| [&head.session, &head.group])
        .flatten()
        .map(String::as_str)
        .collect();
    let in_order: Vec<&str> = named.iter().copied().collect();
    let number = |name: &str| in_order.partition_point(|other| *other < name) as u64;
    let rows: Vec<[u64; COLUMNS]> = entries.iter().map(|entry| numbers(entry, number)).collect();
    let mut out = Vec::new();
    for column in 0..COLUMNS {
        packed_columns::pack(&mut out, rows.iter().map(|row| row[column]));
    }
    name_table::pack(&mut out, &named)?;
    Ok(out)
}

/// The positions of packed records in a byte slice.
pub(super) struct DocumentRecords {
    columns: [PackedColumn; COLUMNS],
    /// How many of the columns the file has. A document has 0 in the others.
    present: usize,
    names: NameTable,
}

impl DocumentRecords {
    /// Opens the records of `documents` documents of a file, and checks all of them.
    pub(super) fn open(
        bytes: &[u8],
        documents: usize,
        version: FileVersion,
    ) -> Result<DocumentRecords, Damage> {
        let present = match version {
            FileVersion::V2 => COLUMNS_V2,
            FileVersion::V3 => COLUMNS,
        };
        let mut columns = [PackedColumn::open(bytes, 0, documents)?; COLUMNS];
        for at in 1..present {
            columns[at] = PackedColumn::open(bytes, columns[at - 1].end(), documents)?;
        }
        let names = NameTable::open(bytes, columns[present - 1].end())?;
        if names.end() != bytes.len() {
            return Err(Damage::Length);
        }
        let records = DocumentRecords {
            columns,
            present,
            names,
        };
        for number in 0..documents {
            let row = records.row(bytes, number)?;
            state(row, 0)?;
            let [.., session, group, choice, _, _, _, _] = row;
            let is_known = |name: u64| name <= records.names.len() as u64;
            if !is_known(session) || !is_known(group) || u32::try_from(choice).is_err() {
                return Err(Damage::Payload);
            }
        }
        Ok(records)
    }

    fn row(&self, bytes: &[u8], number: usize) -> Result<[u64; COLUMNS], Damage> {
        let mut row = [0; COLUMNS];
        for (value, column) in row.iter_mut().zip(&self.columns[..self.present]) {
            *value = column.get(bytes, number)?;
        }
        Ok(row)
    }

    /// The state of a document with `len` tokens. Its `bytes` are left at 0.
    pub(super) fn state(
        &self,
        bytes: &[u8],
        number: usize,
        len: u32,
    ) -> Result<StateRecord, Damage> {
        state(self.row(bytes, number)?, len)
    }

    /// The prompt of a document, if it is known.
    pub(super) fn prompt(&self, bytes: &[u8], number: usize) -> Result<Option<PromptHash>, Damage> {
        let [.., low, high] = self.row(bytes, number)?;
        Ok(prompt_of(low, high))
    }

    /// The head of a document.
    pub(super) fn head(
        &self,
        bytes: &[u8],
        number: usize,
        left_context: &[TokenId],
    ) -> Result<DocumentHead, Damage> {
        let [
            ..,
            stored_ms,
            _,
            session,
            group,
            choice,
            weight_version,
            created,
            low,
            high,
        ] = self.row(bytes, number)?;
        let name = |name: u64| match name.checked_sub(1) {
            Some(name) => self.names.get(bytes, name as usize).map(Some),
            None => Ok(None),
        };
        Ok(DocumentHead {
            session: name(session)?,
            group: name(group)?,
            choice: u32::try_from(choice).map_err(|_| Damage::Payload)?,
            weight_version,
            created_ms: beside(created, stored_ms),
            left_context: left_context.to_vec(),
            prompt_hash: prompt_of(low, high),
        })
    }
}

/// The prompt whose hash has these halves.
fn prompt_of(low: u64, high: u64) -> Option<PromptHash> {
    let hash = u128::from(high) << 64 | u128::from(low);
    (hash != 0).then_some(PromptHash(hash))
}

fn state(row: [u64; COLUMNS], len: u32) -> Result<StateRecord, Damage> {
    let [epoch, epoch_start, finish, sequence, stored_ms, used, ..] = row;
    Ok(StateRecord {
        epoch,
        epoch_start: u32::try_from(epoch_start).map_err(|_| Damage::Payload)?,
        len,
        finish: u8::try_from(finish).map_err(|_| Damage::Payload)?,
        sequence,
        stored_ms,
        used_ms: beside(used, stored_ms),
        tail_start: len,
        tail_pieces: 0,
        bytes: 0,
    })
}
