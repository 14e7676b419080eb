//! Requests that stop before their output has ended, and go on or are asked again.

use std::cell::Cell;

use super::*;

/// The document of the output that begins so, once the store and the copies of the drafts have so much of it.
fn said(rig: &Rig, request: &str, output: &[u32], group: Option<&Membership>) -> DocumentId {
    let found = Cell::new(None);
    wait_until(|| {
        rig.proposer.extend(request, &[]);
        rig.drain();
        let outputs = rig.store.outputs();
        let Some((document, ..)) = outputs.iter().find(|kept| kept.1 == output) else {
            return false;
        };
        found.set(Some(*document));
        let len = Some(output.len() as u32);
        rig.memory().read().len_of(*document) == len
            && group.is_none_or(|member| member.group().read().len_of(*document) == len)
    });
    found.get().unwrap()
}

#[test]
fn what_was_erased_while_it_ran_stays_away() {
    let rig = Rig::new(|config| {
        config.memory.follow_wait_ms = 1;
        config.piece_tokens = 1;
    });
    let member = rig.group("g");
    let prompt = text(1_000, 20);
    for (number, group, goes_on) in [
        (0, None, false),
        (100, None, true),
        (200, Some("g"), false),
        (300, Some("g"), true),
    ] {
        let request = &number.to_string();
        rig.begin(request, &prompt, group);
        rig.proposer.extend(request, &text(number, 30));
        let of = group.map(|_| &member);
        let document = said(&rig, request, &text(number, 30), of);
        rig.store.erased.lock().unwrap().push(document);
        let is_gone = || {
            let in_group = member.group().read().len_of(document);
            rig.memory().read().len_of(document).is_none() && in_group.is_none()
        };
        wait_until(is_gone);
        if goes_on {
            rig.proposer.finish(request.clone(), None);
            rig.drain();
            assert!(is_gone(), "{number}");
            rig.begin(request, &prompt, group);
            rig.proposer.extend(request, &text(number + 30, 10));
        }
        rig.proposer.finish(request.clone(), Some("stop"));
        rig.drain();
        assert!(is_gone(), "{number}");
    }
}

#[test]
fn a_request_that_goes_on_is_taken_up_where_it_stopped() {
    let rig = Rig::new(|config| config.piece_tokens = 1);
    let member = rig.group("g");
    rig.begin("a", &text(1_000, 20), Some("g"));
    rig.proposer.extend("a", &text(0, 30));
    let document = said(&rig, "a", &text(0, 30), Some(&member));
    for len in [40, 50] {
        rig.proposer.finish("a".into(), None);
        rig.begin("a", &text(1_000, 20), Some("g"));
        rig.proposer.extend("a", &text(len - 10, 10));
        assert_eq!(said(&rig, "a", &text(0, len), Some(&member)), document);
    }
    // Nothing was cut off there, to be read once more.
    assert_eq!(rig.memory().read().index().dead_tokens(), 0);
    assert_eq!(member.group().read().index().dead_tokens(), 0);
}

#[test]
fn of_two_attempts_at_a_named_output_the_newer_ones_text_is_kept() {
    let rig = Rig::new(|_| {});
    let token = rig.token("model");
    let member = rig.group("g");
    let attempt = |request: &str, output: &[u32]| {
        let begin = Begin {
            request: request.into(),
            prompt: text(1_000, 20),
            namespace: Some(&token),
            group: Some("g".into()),
            document: Some(NAMED),
            epoch: 3,
            ..Begin::default()
        };
        rig.proposer.begin(begin).unwrap();
        for token in output {
            rig.proposer.extend(request, &[*token]);
        }
        let document = NAMED.parse().unwrap();
        wait_until(|| {
            rig.proposer.extend(request, &[]);
            let len = Some(output.len() as u32);
            let in_group = member.group().read().len_of(document);
            rig.memory().read().len_of(document) == len && in_group == len
        });
    };
    attempt("lost", &text(0, 30));
    rig.proposer.finish("lost".into(), None);
    attempt("again", &[text(0, 10), text(500, 10)].concat());
    for group in [None, Some("g")] {
        let other = group.unwrap_or("other");
        rig.begin(other, &text(1_000, 20), group);
        rig.proposer
            .extend(other, &[text(0, 10), text(500, 2)].concat());
        rig.await_draft(other, &text(502, 8));
    }
}

#[test]
fn only_what_was_interrupted_is_remembered() {
    let rig = Rig::new(|config| config.paused_requests_max = 1);
    let prompt = text(1_000, 20);
    let begin = |request: &str| {
        let begin = Begin {
            request: request.into(),
            prompt: prompt.clone(),
            ..Begin::default()
        };
        rig.proposer.begin(begin).unwrap()
    };
    begin("paused");
    rig.proposer.extend("paused", &text(0, 30));
    rig.proposer.finish("paused".into(), None);
    let metrics = &rig.proposer.metrics;
    for reason in ["stop", "length", "repetition", "error"] {
        assert_eq!(begin("ended"), 0, "{reason}");
        rig.proposer.extend("ended", &text(100, 30));
        rig.proposer.finish("ended".into(), Some(reason));
        assert_eq!(metrics.paused_tokens.get(), 50, "{reason}");
    }
    assert_eq!(metrics.forgotten.get(), 0);
    assert_eq!((begin("ended"), begin("paused")), (0, 30));
    for request in ["ended", "paused"] {
        rig.proposer.finish(request.into(), None);
    }
    assert_eq!(metrics.forgotten.get(), 1);
    // Outputs of one name are documents of their own.
    rig.drain();
    assert_eq!(rig.store.outputs().len(), 6);
}

#[test]
fn a_request_that_was_refused_is_not_taken_up_again() {
    let rig = Rig::new(|_| {});
    let begin = || Begin {
        request: "a".into(),
        prompt: text(1_000, 20),
        namespace: Some("nonsense"),
        ..Begin::default()
    };
    assert!(rig.proposer.begin(begin()).is_err());
    rig.proposer.extend("a", &text(0, 30));
    rig.proposer.finish("a".into(), None);
    assert!(rig.proposer.begin(begin()).is_err());
    // It was told of no length, and hands over all of its output. Said twice it would be drafted from.
    rig.proposer.extend("a", &text(0, 30));
    assert!(rig.draft("a", 5).is_empty());
    rig.proposer.extend("a", &[0, 1]);
    assert_eq!(rig.draft("a", 2), text(2, 2));
}
