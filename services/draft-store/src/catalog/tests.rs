use super::*;

use refrain_protocol::{DocumentId, Namespace, NamespaceId};

use crate::catalog::document::BOUNDARIES_MAX;
use crate::catalog::state::Totals;
use crate::record::{DocumentKey, StateRecord};

fn names(tenant: &str) -> Namespace {
    Namespace {
        tenant: tenant.into(),
        model: "m".into(),
        tokenizer: "t".into(),
    }
}

fn key(namespace: NamespaceId, document: u128) -> DocumentKey {
    DocumentKey::new(namespace, DocumentId(document))
}

fn state(catalog: &mut Catalog, len: u32) -> StateRecord {
    StateRecord {
        epoch: 1,
        epoch_start: 0,
        len,
        finish: 0,
        sequence: catalog.advance(),
        stored_ms: 0,
        used_ms: 0,
        tail_start: 0,
        tail_pieces: 0,
        bytes: len,
    }
}

fn changes(catalog: &Catalog, namespace: NamespaceId, mut after: u64) -> Vec<(u32, u32, bool)> {
    let mut seen = Vec::new();
    while let Some((sequence, change)) = catalog.next_change(namespace, after, &Default::default())
    {
        after = sequence;
        if let FeedChange::Range {
            start, end, last, ..
        } = change
        {
            seen.push((start, end, last));
        }
    }
    seen
}

#[test]
fn a_growing_document_has_a_range_per_step_and_settles_into_one() {
    let mut catalog = Catalog::new(1, 0);
    let id = names("a").id();
    catalog.introduce(id, &names("a"));
    for len in [10, 20, 30] {
        let state = state(&mut catalog, len);
        catalog.put(key(id, 1), state, Some(len - 10));
    }
    assert_eq!(
        changes(&catalog, id, 0),
        [(0, 10, false), (10, 20, false), (20, 30, true)]
    );
    assert_eq!(changes(&catalog, id, 2), [(20, 30, true)]);
    let cut = state(&mut catalog, 18);
    catalog.put(key(id, 1), cut, Some(15));
    assert_eq!(
        changes(&catalog, id, 0),
        [(0, 10, false), (10, 15, false), (15, 18, true)]
    );
    catalog.settle(key(id, 1));
    assert_eq!(changes(&catalog, id, 0), [(0, 18, true)]);
    assert_eq!(changes(&catalog, id, 4), []);
    for step in 0..200 {
        let state = state(&mut catalog, 19 + step);
        catalog.put(key(id, 1), state, Some(18 + step));
    }
    let seen = changes(&catalog, id, 0);
    assert!(seen.len() <= BOUNDARIES_MAX);
    assert!(
        seen.windows(2).all(|pair| pair[0].1 == pair[1].0),
        "no gaps: {seen:?}"
    );
}

#[test]
fn the_least_recently_used_documents_are_evicted_first() {
    let mut catalog = Catalog::new(1, 0);
    let (a, b) = (names("a").id(), names("b").id());
    catalog.introduce(a, &names("a"));
    catalog.introduce(b, &names("b"));
    for (namespace, document) in [(a, 1), (b, 2), (a, 3)] {
        let state = state(&mut catalog, 10);
        catalog.put(key(namespace, document), state, Some(0));
    }
    assert_eq!(catalog.uses.oldest(), Some(key(a, 1)));
    catalog.touch(key(a, 1), 5, 0);
    assert_eq!(catalog.uses.oldest(), Some(key(b, 2)));
    assert_eq!(victim(&catalog, 15), Some(key(a, 3)));
    assert_eq!(victim(&catalog, 20), None);
    catalog.take(key(b, 2));
    assert_eq!(
        catalog.totals(),
        Totals {
            documents: 2,
            tokens: 20,
            bytes: 20,
            namespaces: 1
        }
    );
}

#[test]
fn a_nameless_namespace_gets_its_tenant_back() {
    let mut catalog = Catalog::new(1, 0);
    let id = names("a").id();
    let state = state(&mut catalog, 10);
    catalog.put(key(id, 1), state, Some(0));
    assert_eq!(victim(&catalog, 5), Some(key(id, 1)));
    assert!(catalog.introduce(id, &names("a")));
    assert!(!catalog.introduce(id, &names("a")));
    assert_eq!(&*catalog.namespaces[&id].tenant, "a");
    assert_eq!(catalog.uses.size_mut(&"a".into()).tokens, 10);
    assert_eq!(catalog.uses.size_mut(&"".into()).tokens, 0);
}

fn victim(catalog: &Catalog, tokens_max: u64) -> Option<DocumentKey> {
    let victim = catalog.uses.victim(|_| (tokens_max, u64::MAX));
    victim.map(|(key, _)| key)
}
