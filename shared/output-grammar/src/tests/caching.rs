//! Tests of the threads that compile, and of what is kept.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use refrain_protocol::NamespaceId;
use refrain_protocol::engine::TextForm;

use super::{MODEL, form, schema};
use crate::cache::{Cache, CacheSize};
use crate::cache_key::CacheKey;
use crate::jobs::{Job, Jobs};
use crate::shares::Shares;
use crate::{GrammarCompiler, GrammarError, GrammarLimits, Outcome};

fn compiler(limits: GrammarLimits) -> GrammarCompiler {
    let size = MODEL.tokenizer.vocab_size();
    GrammarCompiler::new(MODEL.tokenizer.clone(), size, &[MODEL.eos], limits).unwrap()
}

fn job(namespace: u128, number: usize) -> Job {
    let form = form(TextForm::Choice(vec![format!("text {number}")]));
    let key = CacheKey::new(NamespaceId(namespace), &form, 1 << 20).unwrap();
    Job { key, form }
}

fn refused() -> Outcome {
    Err(GrammarError::Refused("no".into()))
}

/// Starts jobs whose work waits for the barrier. Returns the outcomes and the number of works.
fn outcomes(jobs: &Arc<Jobs>, wanted: Vec<Job>, gate: &Arc<Barrier>) -> (Vec<Outcome>, usize) {
    let (sender, receiver) = mpsc::channel();
    let works = Arc::new(AtomicUsize::new(0));
    let count = wanted.len();
    for job in wanted {
        let (sender, works, gate) = (sender.clone(), works.clone(), gate.clone());
        let then = Box::new(move |outcome| sender.send(outcome).unwrap());
        jobs.start(
            job,
            then,
            || None,
            move |_| {
                works.fetch_add(1, Ordering::Relaxed);
                gate.wait();
                refused()
            },
        );
    }
    gate.wait();
    let outcomes = (0..count).map(|_| receiver.recv_timeout(Duration::from_secs(120)).unwrap());
    (outcomes.collect(), works.load(Ordering::Relaxed))
}

#[test]
fn equal_forms_are_compiled_once() {
    let jobs = Arc::new(Jobs::new(2, 64));
    let wanted = (0..40).map(|_| job(1, 7)).collect();
    let (outcomes, works) = outcomes(&jobs, wanted, &Arc::new(Barrier::new(2)));
    assert_eq!(works, 1);
    assert!(
        outcomes
            .iter()
            .all(|outcome| outcome.as_ref().err() == refused().as_ref().err())
    );
    assert_eq!(jobs.waiting(), 0);
}

#[test]
fn few_forms_are_compiled_at_once_and_few_wait() {
    let jobs = Arc::new(Jobs::new(2, 8));
    // Both threads wait at the gate with one form each, so the rest of the queue is known.
    let gate = Arc::new(Barrier::new(3));
    let (sender, receiver) = mpsc::channel();
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let start = |job: Job| {
        let (sender, gate) = (sender.clone(), gate.clone());
        let (running, most) = (running.clone(), most.clone());
        let then = Box::new(move |outcome: Outcome| sender.send(outcome.err()).unwrap());
        jobs.start(
            job,
            then,
            || None,
            move |_| {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                gate.wait();
                gate.wait();
                running.fetch_sub(1, Ordering::SeqCst);
                refused()
            },
        );
    };
    start(job(1, 0));
    start(job(1, 1));
    gate.wait();
    // Two of this namespace wait, and then two of each other.
    (2..10).for_each(|number| start(job(1, number)));
    let error = || {
        receiver
            .recv_timeout(Duration::from_secs(120))
            .unwrap()
            .unwrap()
    };
    for _ in 0..6 {
        assert!(matches!(error(), GrammarError::NotNow(_)));
    }
    (2..12).for_each(|namespace| start(job(namespace, 0)));
    for _ in 0..4 {
        assert!(matches!(error(), GrammarError::NotNow(_)));
    }
    // Five rounds of two forms.
    gate.wait();
    for _ in 0..4 {
        gate.wait();
        gate.wait();
    }
    for _ in 0..10 {
        assert_eq!(error(), GrammarError::Refused("no".into()));
    }
    assert_eq!(most.load(Ordering::SeqCst), 2);
}

#[test]
fn a_fault_in_passing_is_not_kept() {
    let compiler = compiler(GrammarLimits {
        waiting_forms_max: 1,
        compile_threads_max: 1,
        ..GrammarLimits::default()
    });
    // While forms are compiled, some of these find the queue full.
    let (sender, receiver) = mpsc::channel();
    let choice = |number: usize| form(TextForm::Choice(vec![format!("{number}")]));
    for number in 0..50 {
        let sender = sender.clone();
        let then = move |outcome: Outcome| sender.send((number, outcome.is_ok())).unwrap();
        compiler.start(NamespaceId(1), &choice(number), then);
    }
    let outcomes: Vec<(usize, bool)> = (0..50)
        .map(|_| receiver.recv_timeout(Duration::from_secs(120)).unwrap())
        .collect();
    let refused: Vec<usize> = outcomes
        .iter()
        .filter(|(_, is_compiled)| !is_compiled)
        .map(|(number, _)| *number)
        .collect();
    for number in &refused {
        assert!(compiler.known(NamespaceId(1), &choice(*number)).is_none());
        assert!(
            compiler
                .compile_for(NamespaceId(1), &choice(*number))
                .is_ok()
        );
    }
    assert!(!refused.is_empty());
    assert_eq!(compiler.forms_refused(), refused.len() as u64);
}

#[test]
fn namespaces_have_shares_and_refusals_push_nothing_out() {
    let grammar = MODEL.compiler.compile(&form(TextForm::JsonObject)).unwrap();
    let limits = GrammarLimits {
        cached_bytes_max: 10 * grammar.bytes(),
        ..GrammarLimits::default()
    };
    let mut cache = Cache::new(&limits);
    let key = |namespace, number| job(namespace, number).key;
    (0..3).for_each(|number| cache.insert(key(1, number), &Ok(grammar.clone())));
    for number in 0..100 {
        cache.insert(key(2, number), &Ok(grammar.clone()));
        cache.insert(key(2, 1_000 + number), &refused());
    }
    assert!((0..3).all(|number| {
        cache
            .outcome(&key(1, number))
            .is_some_and(|found| found.is_ok())
    }));
    let own: Vec<usize> = (0..100)
        .filter(|number| cache.outcome(&key(2, *number)).is_some())
        .collect();
    assert_eq!(own, (93..100).collect::<Vec<_>>());
    // The verdict of one that was pushed out is still known, and others do not know it.
    assert!(
        cache
            .verdict(&key(2, 0))
            .is_some_and(|verdict| verdict.is_ok())
    );
    assert!(cache.verdict(&key(3, 0)).is_none());
    let size = CacheSize {
        grammars: 10,
        grammar_bytes: 10 * grammar.bytes(),
        verdicts: 203,
        pushed_out: 93,
    };
    assert_eq!(cache.size(), size);
    // To replace one grammar by itself takes no room.
    cache.insert(key(1, 0), &Ok(grammar));
    assert_eq!(cache.size(), size);
}

#[test]
fn verdicts_have_shares_as_well() {
    let limits = GrammarLimits {
        verdicts_max: 10,
        ..GrammarLimits::default()
    };
    let mut cache = Cache::new(&limits);
    let key = |namespace, number| job(namespace, number).key;
    (0..2).for_each(|number| cache.insert(key(1, number), &refused()));
    (0..50).for_each(|number| cache.insert(key(2, number), &refused()));
    (0..3).for_each(|namespace| cache.insert(key(10 + namespace, 0), &refused()));
    assert!((0..2).all(|number| cache.verdict(&key(1, number)).is_some()));
    let own = (0..50).filter(|number| cache.verdict(&key(2, *number)).is_some());
    assert_eq!(own.collect::<Vec<_>>(), (45..50).collect::<Vec<_>>());
    assert_eq!(cache.size().verdicts, 10);
}

#[test]
fn of_equal_shares_the_one_that_was_not_used_for_longest_gives_way() {
    let mut shares = Shares::new(4);
    let key = |namespace| job(namespace, 0).key;
    (1..=4).for_each(|namespace| {
        shares.insert(key(namespace), namespace, 1);
    });
    assert_eq!(shares.get(&key(1)), Some(&1));
    assert_eq!(shares.insert(key(5), 5, 1), 1);
    assert_eq!(shares.get(&key(2)), None);
    // One that is heavier than all room is not kept, and the others give way to nothing.
    assert_eq!(shares.insert(key(6), 6, 9), 1);
    assert_eq!((shares.len(), shares.weight()), (4, 4));
}

#[test]
fn verdicts_are_kept_without_grammars() {
    let limits = GrammarLimits {
        cached_bytes_max: 0,
        form_bytes_max: 1_000,
        ..GrammarLimits::default()
    };
    let compiler = compiler(limits);
    let good = form(TextForm::JsonObject);
    let bad = form(schema(r#"{"not":{}}"#));
    let (own, other) = (NamespaceId(1), NamespaceId(2));
    assert!(compiler.verdict(own, &good).is_none());
    assert!(compiler.compile_for(own, &good).is_ok());
    assert!(compiler.compile_for(own, &bad).is_err());
    assert_eq!(compiler.cached().grammars, 0);
    assert_eq!(compiler.verdict(own, &good), Some(Ok(())));
    assert!(
        compiler
            .verdict(own, &bad)
            .is_some_and(|verdict| verdict.is_err())
    );
    // No other namespace learns of them.
    assert!(compiler.verdict(other, &good).is_none() && compiler.verdict(other, &bad).is_none());
    assert!(compiler.known(own, &good).is_none());
    let long = form(TextForm::Regex("x".repeat(1_000)));
    assert!(
        compiler
            .verdict(own, &long)
            .is_some_and(|verdict| verdict.is_err())
    );
}
