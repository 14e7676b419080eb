//! The key that a misspelt one stands for.

use std::collections::BTreeSet;

use schemars::JsonSchema;

use super::schema_keys::keys;

/// Least likeness of two names that are taken for one, of at most 1 (Jaro and Winkler).
const LIKENESS_MIN: f64 = 0.88;

/// The key of `T` that is most like an unknown one: one of nearly that name, or of that name in another section.
pub(super) fn similar_key<T: JsonSchema>(unknown: &str) -> Option<String> {
    // The elements of a list have the keys of any other.
    let segments = unknown.split('.');
    let segments = segments.filter(|segment| segment.parse::<usize>().is_err());
    let segments: Vec<&str> = segments.collect();
    let (name, section) = segments.split_last()?;
    let section = section.join(".");
    let likeness = |key: &String| {
        let (head, tail) = key.rsplit_once('.').unwrap_or(("", key));
        let of_name = strsim::jaro_winkler(name, tail);
        // A name in its own section before the same name in another.
        let of_section = strsim::jaro_winkler(&section, head);
        let is_like = of_name >= LIKENESS_MIN && (head == section || of_name == 1.0);
        is_like.then_some(of_name + of_section)
    };
    let keys = paths::<T>().into_iter();
    let alike = keys.filter_map(|key| Some((likeness(&key)?, key)));
    let best = alike.max_by(|one, other| one.0.total_cmp(&other.0))?;
    Some(best.1)
}

/// The paths of all keys and sections.
fn paths<T: JsonSchema>() -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    for key in keys::<T>() {
        // The elements of a list have the keys of any other.
        let mut path = key.path.replace("[]", "");
        while paths.insert(path.clone()) {
            let Some((section, _)) = path.rsplit_once('.') else {
                break;
            };
            path.truncate(section.len());
        }
    }
    paths
}
