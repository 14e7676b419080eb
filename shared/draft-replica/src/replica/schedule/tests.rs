//! Which scopes are asked for, and when.

use super::*;

const INTERVAL: Duration = Duration::from_millis(50);

fn scope(number: u128) -> ScopeKey {
    (NamespaceId(number), Scope::Namespace)
}

fn scopes<const N: usize>(numbers: [u128; N]) -> Vec<ScopeKey> {
    numbers.map(scope).to_vec()
}

fn schedule(of: impl IntoIterator<Item = u128>) -> Schedule {
    let mut schedule = Schedule::new(INTERVAL);
    for number in of {
        schedule.set_idle(scope(number), 0);
    }
    schedule
}

#[track_caller]
fn ask(schedule: &mut Schedule, now: Instant) -> Ask {
    match schedule.next(now) {
        Next::Ask(ask) => ask,
        Next::Wait(until) => panic!("it waits until {until:?}"),
    }
}

#[test]
fn ready_scopes_are_in_one_call_and_the_next_one_comes_after_an_interval() {
    let start = Instant::now();
    let mut schedule = schedule([1, 2, 3]);
    let first = ask(&mut schedule, start);
    assert_eq!(
        (&first.scopes, first.is_partial),
        (&scopes([1, 2, 3]), false)
    );
    // One call at a time.
    assert_eq!(schedule.next(start), Next::Wait(None));
    let answered = start + Duration::from_secs(9);
    schedule.record_answer(&first, false, Some(1), answered);
    schedule.set_busy(&scope(2));
    assert_eq!(
        schedule.next(answered),
        Next::Wait(Some(answered + INTERVAL))
    );
    let second = ask(&mut schedule, answered + INTERVAL);
    assert_eq!(second.scopes, scopes([1, 3]));
    schedule.remove(&scope(1));
    schedule.remove(&scope(3));
    schedule.record_answer(&second, false, None, answered + 2 * INTERVAL);
    assert_eq!(schedule.next(answered + 4 * INTERVAL), Next::Wait(None));
}

#[test]
fn a_scope_that_is_ready_while_a_call_waits_is_asked_for_soon_and_the_others_again() {
    let start = Instant::now();
    let mut schedule = schedule([1, 2]);
    let first = ask(&mut schedule, start);
    schedule.set_idle(scope(3), 0);
    assert_eq!(schedule.next(start), Next::Wait(Some(start + INTERVAL)));
    let second = ask(&mut schedule, start + INTERVAL);
    assert_eq!(second.scopes, scopes([1, 2, 3]));
    // An answer to the call that was given up concerns nobody.
    assert!(!schedule.is_asked(&scope(1), &first) && schedule.is_asked(&scope(1), &second));
    schedule.remove(&scope(2));
    schedule.set_idle(scope(2), 0);
    assert!(
        !schedule.is_asked(&scope(2), &second),
        "another one of its name"
    );
}

#[test]
fn where_answers_are_full_each_scope_has_its_turn() {
    let now = Instant::now();
    let mut schedule = schedule(0..7);
    let mut served = Vec::new();
    for _ in 0..14 {
        // Each answer has room for one scope, and there is always more.
        let full = ask(&mut schedule, now);
        assert_eq!(full.scopes.len(), 7);
        served.push(full.scopes[0].0.0);
        schedule.record_answer(&full, true, Some(0), now);
    }
    served.sort_unstable();
    let twice: Vec<u128> = (0..14).map(|turn| turn / 2).collect();
    assert_eq!(served, twice);
}

#[test]
fn a_scope_with_a_backlog_that_is_being_applied_leaves_the_others_their_calls() {
    let now = Instant::now();
    let mut schedule = schedule([1, 2, 3]);
    let full = ask(&mut schedule, now);
    schedule.record_answer(&full, true, Some(0), now);
    schedule.set_busy(&scope(1));
    // At once, since news are there.
    assert_eq!(ask(&mut schedule, now).scopes, scopes([2, 3]));
}

#[test]
fn more_scopes_than_a_call_may_have_take_turns() {
    let mut now = Instant::now();
    let all = SCOPES_MAX as u128 * 2 + 10;
    let mut schedule = schedule(0..all);
    let mut asked = BTreeSet::new();
    for _ in 0..3 {
        let part = ask(&mut schedule, now);
        assert!(part.is_partial && part.scopes.len() == SCOPES_MAX);
        // The others wait for its answer.
        assert_eq!(schedule.next(now + INTERVAL), Next::Wait(None));
        asked.extend(part.scopes.iter().map(|scope| scope.0.0));
        schedule.record_answer(&part, false, None, now);
        now += INTERVAL;
    }
    assert_eq!(asked.len() as u128, all);
}

#[test]
fn a_shard_that_fails_is_asked_ever_more_seldom_and_the_others_as_before() {
    let start = Instant::now();
    let mut schedule = schedule([1]);
    schedule.set_idle(scope(2), 7);
    let calls = [ask(&mut schedule, start), ask(&mut schedule, start)];
    assert_eq!(calls.each_ref().map(|call| call.shard), [0, 7]);
    schedule.record_answer(&calls[1], false, None, start);
    let mut now = start;
    let mut failed = calls[0].clone();
    let mut pauses = Vec::new();
    for _ in 0..8 {
        schedule.record_failure(&failed, now);
        let mut next = now;
        let other = loop {
            next += Duration::from_millis(1);
            match schedule.next(next) {
                Next::Ask(ask) if ask.shard == 0 => break ask,
                Next::Ask(ask) => schedule.record_answer(&ask, false, None, next),
                Next::Wait(until) => assert!(until.is_some()),
            }
        };
        pauses.push(next - now);
        (failed, now) = (other, next);
    }
    assert!(pauses[7] > 8 * pauses[0], "{pauses:?}");
    schedule.record_answer(&failed, false, None, now);
    let again = ask_of(&mut schedule, 0, now + INTERVAL);
    schedule.record_failure(&again, now + INTERVAL);
    let soon = now + INTERVAL + Duration::from_millis(101);
    assert_eq!(
        ask_of(&mut schedule, 0, soon).shard,
        0,
        "an answer ends the pauses"
    );
}

#[test]
fn scopes_whose_shards_become_known_are_in_calls_of_their_own() {
    let start = Instant::now();
    let mut schedule = schedule([1, 2]);
    let mixed = ask(&mut schedule, start);
    schedule.record_failure(&mixed, start);
    schedule.set_shard(&scope(2), 1);
    let later = start + Duration::from_secs(1);
    let calls = [ask(&mut schedule, later), ask(&mut schedule, later)];
    assert_eq!(calls.map(|call| call.scopes), [scopes([1]), scopes([2])]);
}

/// The next call to a shard, for which calls to others are answered.
#[track_caller]
fn ask_of(schedule: &mut Schedule, shard: u32, now: Instant) -> Ask {
    loop {
        let next = ask(schedule, now);
        if next.shard == shard {
            return next;
        }
        schedule.record_answer(&next, false, None, now);
    }
}
