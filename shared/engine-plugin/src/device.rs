//! The device index: the texts that drafts are read from on an accelerator, beside the engine's own runner.
//!
//! An engine that schedules ahead cannot wait for the host's drafts. It searches the segments of its requests'
//! namespaces on the device instead. This module says which segments those are, and where each lies there:
//!
//! * an actor (`export.rs`) looks at the namespaces in use. It writes each sealed segment to a file in memory, and
//!   the outputs that are not sealed yet as one more segment, which is made anew as they change;
//! * [`DeviceIndex::take`] compares what should be on the device with what is there. Its commands go to all ranks
//!   with one step, so that all of them draft from the same texts;
//! * `arena.rs` divides the device's memory, as a pure function.
//!
//! Documents that are removed are left out of their segment, which is sent anew, and the old one is overwritten.

mod arena;
mod export;
mod part;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use refrain_protocol::NamespaceId;
use serde::Deserialize;

use self::arena::{Arena, Place};
use self::part::{Part, PartFile, PartFolder};

pub(crate) use self::export::DeviceExport;

/// Limits of the device index.
#[derive(Clone, Debug, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct DeviceConfig {
    /// Most bytes of segments on each device. A token takes eight. The namespaces that were used least recently are
    /// left out first.
    pub bytes_max: u64,
    /// Folder of the files that carry segments to the devices' processes. It should be in memory, and all of them
    /// have to see it.
    pub folder: PathBuf,

    /// Most segments on a device.
    #[serde(skip)]
    pub segments_max: usize,
    /// Shortest pause between two looks for news, milliseconds. Outputs that have ended are on the device after about
    /// so long.
    #[serde(skip)]
    pub refresh_ms: u64,
    /// Most bytes that one step loads, so that none waits long for the copy. A larger segment has a step to itself.
    #[serde(skip)]
    pub step_bytes_max: u64,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        DeviceConfig {
            bytes_max: 268_435_456,
            folder: "/dev/shm".into(),
            segments_max: 1_024,
            refresh_ms: 50,
            step_bytes_max: 33_554_432,
        }
    }
}

impl DeviceConfig {
    /// Words of the arena.
    pub fn words_max(&self) -> u64 {
        self.bytes_max / size_of::<u32>() as u64
    }
}

/// A change of the texts on the devices. Commands are carried out in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceCommand {
    /// Take a segment away, and overwrite its words.
    Drop {
        /// The number of the segment.
        number: u32,
        /// Its first word in the arena.
        at: u64,
        /// Its length, words.
        words: u64,
    },
    /// Load a segment from a file of little-endian words: its text, and behind it its suffix array.
    Load {
        /// The number that the segment gets.
        number: u32,
        /// The number of its namespace. Nobody else may read it.
        namespace: u32,
        /// Its first word in the arena.
        at: u64,
        /// Length of its text, words.
        text_words: u64,
        /// The file.
        file: PathBuf,
    },
}

/// A namespace whose requests run here, or ran lately.
struct Scope {
    number: u32,
    /// Grows with each use of any namespace.
    used: u64,
    parts: Vec<Part>,
}

#[derive(Default)]
struct State {
    scopes: HashMap<NamespaceId, Scope>,
    last_number: u32,
    last_use: u64,
    last_part: u32,
    /// Nothing changes on the devices until something is published.
    is_settled: bool,
    /// Segments were left out for want of room.
    has_rest: bool,
    /// The segments on the devices, by number.
    loaded: BTreeMap<u32, Place>,
    /// The files of segments that steps in progress load, the oldest step first.
    loading: VecDeque<Vec<Arc<PartFile>>>,
}

/// The texts on the devices, and those that should be there.
pub(crate) struct DeviceIndex {
    config: DeviceConfig,
    namespaces_max: usize,
    folder: PartFolder,
    state: Mutex<State>,
}

impl DeviceIndex {
    /// # Errors
    /// The folder of files cannot be made.
    pub(crate) fn new(config: DeviceConfig, namespaces_max: usize) -> anyhow::Result<Self> {
        Ok(DeviceIndex {
            folder: PartFolder::create(&config.folder)?,
            config,
            namespaces_max,
            state: Mutex::default(),
        })
    }

    /// The number of a namespace, which a request of it brings into use. Past the limit the least recently used
    /// namespace is forgotten.
    pub(crate) fn number(&self, namespace: NamespaceId) -> u32 {
        let state = &mut *self.state.lock();
        state.last_use += 1;
        // Those of a namespace in use come before others.
        state.is_settled &= !state.has_rest;
        if let Some(scope) = state.scopes.get_mut(&namespace) {
            scope.used = state.last_use;
            return scope.number;
        }
        if state.scopes.len() >= self.namespaces_max {
            let oldest = state.scopes.iter().min_by_key(|(_, scope)| scope.used);
            let oldest = oldest.map(|(id, _)| *id);
            oldest.and_then(|id| state.scopes.remove(&id));
            state.is_settled = false;
        }
        state.last_number += 1;
        let scope = Scope {
            number: state.last_number,
            used: state.last_use,
            parts: Vec::new(),
        };
        state.scopes.insert(namespace, scope);
        state.last_number
    }

    /// The number of a namespace that is in use. This is no use of it.
    pub(crate) fn known_number(&self, namespace: NamespaceId) -> Option<u32> {
        let state = self.state.lock();
        state.scopes.get(&namespace).map(|scope| scope.number)
    }

    /// The changes that the next step makes on all devices. Call [`has_loaded`](Self::has_loaded) once the step has
    /// loaded segments.
    pub(crate) fn take(&self) -> Vec<DeviceCommand> {
        let state = &mut *self.state.lock();
        if state.is_settled {
            return Vec::new();
        }
        let mut scopes: Vec<&Scope> = state.scopes.values().collect();
        scopes.sort_by_key(|scope| std::cmp::Reverse(scope.used));
        let parts = scopes
            .iter()
            .flat_map(|scope| scope.parts.iter().map(|part| (scope.number, part)));
        let wanted: Vec<(u32, &Part)> = parts.collect();
        let sizes = wanted.iter().map(|(_, part)| (part.number, part.words()));
        let mut arena = Arena::new(self.config.words_max(), &state.loaded);
        let fitting = arena.fitting(sizes, self.config.segments_max);
        let mut commands = Vec::new();
        state.loaded.retain(|number, place| {
            let stays = fitting.contains(number);
            if !stays {
                arena.free(*place);
                commands.push(DeviceCommand::Drop {
                    number: *number,
                    at: place.at,
                    words: place.words,
                });
            }
            stays
        });
        state.has_rest = fitting.len() < wanted.len();
        state.is_settled = true;
        let mut files = Vec::new();
        let mut words_left = self.config.step_bytes_max / size_of::<u32>() as u64;
        for (namespace, part) in wanted {
            let is_loaded = state.loaded.contains_key(&part.number);
            if is_loaded || !fitting.contains(&part.number) {
                continue;
            }
            let Some(file) = part.file() else { continue };
            if part.words() > words_left && !files.is_empty() {
                state.is_settled = false;
                break;
            }
            // Free words may lie in pieces that are too small, until another segment goes.
            let Some(place) = arena.take(part.words()) else {
                state.has_rest = true;
                continue;
            };
            words_left = words_left.saturating_sub(part.words());
            state.loaded.insert(part.number, place);
            commands.push(DeviceCommand::Load {
                number: part.number,
                namespace,
                at: place.at,
                text_words: part.text_words,
                file: file.path().to_owned(),
            });
            files.push(file);
        }
        if !files.is_empty() {
            state.loading.push_back(files);
        }
        commands
    }

    /// Takes into account that all devices have loaded the segments of the oldest step that loads any. Their files
    /// are deleted.
    pub(crate) fn has_loaded(&self) {
        let loaded = self.state.lock().loading.pop_front();
        drop(loaded);
    }

    /// Tokens of the segments on each device.
    pub(crate) fn tokens(&self) -> u64 {
        let state = self.state.lock();
        state.loaded.values().map(|place| place.words / 2).sum()
    }

    /// The namespaces in use, the one that was used last first.
    fn namespaces(&self) -> Vec<NamespaceId> {
        let state = self.state.lock();
        let used = state.scopes.iter().map(|(id, scope)| (scope.used, *id));
        let mut used: Vec<(u64, NamespaceId)> = used.collect();
        drop(state);
        used.sort_unstable_by_key(|(used, _)| std::cmp::Reverse(*used));
        used.into_iter().map(|(_, id)| id).collect()
    }

    /// A number for a part, which no other has had.
    fn next_part(&self) -> u32 {
        let mut state = self.state.lock();
        state.last_part += 1;
        state.last_part
    }

    /// Sets the parts of a namespace, the most important first.
    fn publish(&self, namespace: NamespaceId, parts: Vec<Part>) {
        let state = &mut *self.state.lock();
        if let Some(scope) = state.scopes.get_mut(&namespace) {
            let numbers = |parts: &[Part]| parts.iter().map(|part| part.number).collect::<Vec<_>>();
            state.is_settled &= numbers(&scope.parts) == numbers(&parts);
            scope.parts = parts;
        }
    }

    /// Lets go of the file of a part that is on the devices, or is being loaded by a step.
    fn let_go(&self, part: &Part, file: &mut Option<Arc<PartFile>>) {
        if self.state.lock().loaded.contains_key(&part.number) {
            *file = None;
        }
    }

    /// Whether a part can still be had: it is on the device, or its file is there.
    fn is_kept(&self, part: &Part) -> bool {
        part.file().is_some() || self.state.lock().loaded.contains_key(&part.number)
    }
}

#[cfg(test)]
mod tests;
