//! Steps while an index is held or the queue is full.

use super::*;
use crate::metrics::QUEUED_TOKENS_MAX;

/// Begins a request with the output `document`, and merges its first tokens.
fn begin_named(rig: &Rig, request: &str, group: Option<&str>, document: u128, emitted: &[u32]) {
    let token = rig.token("model");
    let name = format!("{document:032x}");
    let begin = RequestStart {
        request: request.into(),
        prompt: text(1_000, 20),
        namespace: Some(&token),
        group: group.map(str::to_owned),
        document: Some(&name),
        epoch: 1,
        ..RequestStart::default()
    };
    rig.proposer.begin(begin).unwrap();
    rig.proposer.extend(request, emitted);
    rig.settle(request, DocumentId(document), emitted.len() as u32);
}

#[test]
fn queued_output_is_limited_whether_it_is_uploaded_or_not() {
    let rig = Rig::new(|config| {
        config.queued_tokens_max = 50;
        config.piece_tokens = 1_000;
    });
    let namespace = rig.namespace();
    let named = [("a", 10), ("b", 11), ("c", 12)];
    for (request, document) in named {
        begin_named(&rig, request, None, document, &[0]);
    }
    rig.begin("d", &[1], None);
    rig.proposer.extend("d", &[0]);
    wait_until(|| {
        rig.proposer.extend("d", &[]);
        namespace.read().index().documents() == 4
    });

    // The background thread waits for this lock, and no step merges anything.
    let held = namespace.write();
    for (request, _) in named {
        rig.proposer.extend(request, &text(1, 20));
        rig.proposer.finish(request.into(), Some("stop"));
    }
    let metrics = &rig.proposer.metrics;
    assert_eq!(metrics.queued_tokens.get(), 40);
    assert_eq!(rig.rejected(QUEUED_TOKENS_MAX), 1);
    // Output that is to be uploaded is queued even when the queue is full.
    rig.proposer.extend("d", &text(1, 20));
    rig.proposer.finish("d".into(), Some("stop"));
    assert_eq!(metrics.queued_tokens.get(), 61);
    assert_eq!(rig.rejected(QUEUED_TOKENS_MAX), 2);
    drop(held);

    rig.drain();
    assert_eq!(metrics.queued_tokens.get(), 0);
    let lengths = named.map(|(_, document)| namespace.read().len_of(DocumentId(document)));
    assert_eq!(lengths, [Some(21), Some(21), Some(1)]);
    let outputs = uploaded(&rig.store);
    assert_eq!(outputs.len(), 1);
    assert_eq!(outputs[0].1, text(0, 21));
}

#[test]
fn readers_do_not_keep_each_other_waiting() {
    let rig = Rig::new(|_| {});
    let member = rig.group("g");
    begin_named(&rig, "a", Some("g"), 10, &text(0, 30));
    begin_named(&rig, "b", Some("g"), 11, &text(0, 20));
    let namespace = rig.namespace();
    // Where a writer waits meanwhile, a step goes without, as it should.
    wait_until(|| {
        let held = (namespace.read(), member.group().read());
        let busy = rig.proposer.metrics.busy.get();
        let draft = rig.draft("b", 10);
        drop(held);
        rig.proposer.metrics.busy.get() == busy && draft == text(20, 10)
    });
    wait_until(|| {
        let held = namespace.read();
        let (answer, answered) = channel();
        let proposer = rig.proposer.clone();
        let asking = thread::spawn(move || answer.send(proposer.stats()));
        let is_answered = answered.recv_timeout(Duration::from_millis(100)).is_ok();
        drop(held);
        // The answer may come late, but must not fail.
        let asked = asking.join();
        is_answered && asked.is_ok()
    });
}
