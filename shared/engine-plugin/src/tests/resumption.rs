//! Requests that are interrupted, and resumed or asked again.

use std::cell::Cell;

use super::*;

/// The document of `output`, once the store and the replicas have all of it.
fn document_of(
    rig: &Rig,
    request: &str,
    output: &[u32],
    group: Option<&GroupMembership>,
) -> DocumentId {
    let found = Cell::new(None);
    wait_until(|| {
        rig.proposer.extend(request, &[]);
        rig.drain();
        let outputs = uploaded(&rig.store);
        let Some((document, ..)) = outputs.iter().find(|kept| kept.1 == output) else {
            return false;
        };
        found.set(Some(*document));
        let len = Some(output.len() as u32);
        rig.namespace().read().len_of(*document) == len
            && group.is_none_or(|member| member.group().read().len_of(*document) == len)
    });
    found.get().unwrap()
}

#[test]
fn an_output_that_is_erased_while_it_runs_stays_erased() {
    let rig = Rig::new(|config| {
        config.replica.pull_wait_ms = 1;
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
        let document = document_of(&rig, request, &text(number, 30), of);
        rig.store.push_news(FeedEvent::Remove(document));
        let is_gone = || {
            let in_group = member.group().read().len_of(document);
            rig.namespace().read().len_of(document).is_none() && in_group.is_none()
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
fn a_resumed_request_goes_on_where_it_stopped() {
    let rig = Rig::new(|config| config.piece_tokens = 1);
    let member = rig.group("g");
    rig.begin("a", &text(1_000, 20), Some("g"));
    rig.proposer.extend("a", &text(0, 30));
    let document = document_of(&rig, "a", &text(0, 30), Some(&member));
    for len in [40, 50] {
        rig.proposer.finish("a".into(), None);
        rig.begin("a", &text(1_000, 20), Some("g"));
        rig.proposer.extend("a", &text(len - 10, 10));
        assert_eq!(
            document_of(&rig, "a", &text(0, len), Some(&member)),
            document
        );
    }
    // Nothing was cut off and appended again.
    assert_eq!(rig.namespace().read().index().sizes().dead_tokens, 0);
    assert_eq!(member.group().read().index().sizes().dead_tokens, 0);
}

#[test]
fn the_newer_of_two_attempts_at_a_named_output_replaces_the_older() {
    let rig = Rig::new(|_| {});
    let token = rig.token("model");
    let member = rig.group("g");
    let attempt = |request: &str, output: &[u32]| {
        let begin = RequestStart {
            request: request.into(),
            prompt: text(1_000, 20),
            namespace: Some(&token),
            group: Some("g".into()),
            document: Some(NAMED),
            epoch: 3,
            ..RequestStart::default()
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
            rig.namespace().read().len_of(document) == len && in_group == len
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
fn only_interrupted_requests_are_remembered() {
    let rig = Rig::new(|config| config.paused_requests_max = 1);
    let prompt = text(1_000, 20);
    let begin = |request: &str| {
        let begin = RequestStart {
            request: request.into(),
            prompt: prompt.clone(),
            ..RequestStart::default()
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
    // Outputs of requests with equal ids are documents of their own.
    rig.drain();
    assert_eq!(uploaded(&rig.store).len(), 6);
}

#[test]
fn interrupted_requests_are_remembered_within_a_limit_of_tokens() {
    let prompt = text(1_000, 20);
    let rig = Rig::new(|config| config.paused_tokens_max = 2 * (20 + 30));
    let interrupt = |request: &str, prompt: &[u32], tokens: u32| {
        rig.begin(request, prompt, None);
        rig.proposer.extend(request, &text(0, tokens));
        rig.proposer.finish(request.into(), None);
        rig.proposer.metrics.paused_tokens.get()
    };
    assert_eq!(interrupt("a", &prompt, 30), 50);
    assert_eq!(interrupt("b", &prompt, 30), 100);
    // A resumed request is not counted while it runs, and counts once when it is interrupted again.
    rig.begin("b", &prompt, None);
    assert_eq!(rig.proposer.metrics.paused_tokens.get(), 50);
    rig.proposer.finish("b".into(), None);
    assert_eq!(rig.proposer.metrics.paused_tokens.get(), 100);
    // One token too many: both others are forgotten.
    assert_eq!(interrupt("c", &prompt, 31), 51);
    assert_eq!(rig.proposer.metrics.forgotten.get(), 2);
    // One that is too long by itself is forgotten as well.
    assert_eq!(interrupt("long", &text(1_000, 200), 30), 0);
    assert_eq!(rig.proposer.metrics.forgotten.get(), 4);
}

#[test]
fn a_refused_request_is_not_resumed() {
    let rig = Rig::new(|_| {});
    let begin = || RequestStart {
        request: "a".into(),
        prompt: text(1_000, 20),
        namespace: Some("nonsense"),
        ..RequestStart::default()
    };
    assert!(rig.proposer.begin(begin()).is_err());
    rig.proposer.extend("a", &text(0, 30));
    rig.proposer.finish("a".into(), None);
    assert!(rig.proposer.begin(begin()).is_err());
    // The caller got no length, so it reports all of its output. If it were resumed, it would draft from its own
    // repetition.
    rig.proposer.extend("a", &text(0, 30));
    assert!(rig.draft("a", 5).is_empty());
    rig.proposer.extend("a", &[0, 1]);
    assert_eq!(rig.draft("a", 2), text(2, 2));
}
