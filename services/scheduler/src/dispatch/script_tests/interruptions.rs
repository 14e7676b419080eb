//! A scheduler that is restarted with another clock, or stands still for a while.

use expect_test::expect;

use super::*;

/// How far ahead the clock of the first scheduler is.
const HOUR_MS: u64 = 3_600_000;

/// A scheduler that has granted leases to requests 1 and 2 an hour later than the next one will start.
fn ahead() -> Script {
    let mut before = Script::new(small());
    let at_ms = HOUR_MS;
    before.run(&format!(
        "{at_ms} beat a slots=2
         {at_ms} ask 1 acme
         {at_ms} ask 2 acme"
    ));
    before
}

/// The epoch of the next lease of request 3 after `script`, which knows the leases of the first scheduler.
fn epoch_after(before: &Script, script: &str, request: &str) -> u64 {
    let mut after = Script::new(small());
    after.newest_lease = before.newest_lease.clone();
    after.run(script);
    epoch_of(after.lease_of(request))
}

#[test]
fn a_scheduler_whose_clock_is_behind_goes_on_above_every_epoch_that_was_seen() {
    let before = ahead();
    let highest = epoch_of(before.lease_of("2"));
    for (script, request) in [
        // A worker has run the chunk, and still does; the first is a worker of an earlier version.
        ("1 beat a slots=2 runs=2\n2 ask 3 acme", "3"),
        ("1 beat a slots=2 seen=2\n2 ask 3 acme", "3"),
        // The worker is another process, so only the gateway knows.
        ("1 beat a slots=2\n2 ask 2 acme so-far=5 seen", "2"),
        ("1 beat a slots=2\n2 ask 2 acme so-far=5 after=5", "2"),
        ("1 beat a slots=2\n2 done 2 5\n3 ask 3 acme", "3"),
    ] {
        let epoch = epoch_after(&before, script, request);
        assert!(epoch > highest, "{epoch} after {highest}: {script}");
    }
}

#[test]
fn an_epoch_that_nobody_granted_is_not_believed() {
    let mut script = Script::new(small());
    script.newest_lease.insert(1, LeaseId(u128::MAX));
    script.run("1 beat a slots=4 runs=1 seen=1\n2 ask 2 acme seen\n3 ask 3 acme");
    let [second, third] = ["2", "3"].map(|request| epoch_of(script.lease_of(request)));
    assert!(second < third && third < (START_MS + HOUR_MS) * 1_000);
}

#[test]
fn a_request_goes_on_above_an_epoch_that_is_not_believed_for_others() {
    let mut script = Script::new(small());
    // All clocks were two days ahead when it began.
    let far = (START_MS + 48 * HOUR_MS) * 1_000;
    let seen = LeaseId((u128::from(far) << 64) | 1);
    script.newest_lease.insert(1, seen);
    script.run("1 beat a slots=4\n2 ask 1 acme so-far=5 seen");
    let first = epoch_of(script.lease_of("1"));
    assert!(first > far);
    // The answer was lost, so it asks once more with all that it knows.
    script.newest_lease.insert(1, seen);
    script.run("3 ask 1 acme age=1 so-far=5 seen\n4 ask 2 acme");
    assert!(epoch_of(script.lease_of("1")) > first);
    assert!(epoch_of(script.lease_of("2")) < (START_MS + HOUR_MS) * 1_000);
}

#[test]
fn the_later_call_holds_although_it_arrives_first() {
    check(
        "0 beat a slots=1
         1 ask 9 acme
         2 ask 1 acme age=4000
         3 ask 1 acme age=10
         4 done 9 5
         5 ask 1 acme age=10
         6 ask 1 acme age=4500",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            3 reject #3: 409 the same request asked for a lease again; only the newer call goes on waiting
            4 end of 9 on a: finished
            4 grant #2 on a after 2 ms
            5 reject #4: 409 the same request asked for a lease again; only the newer call goes on waiting
            6 end of 1 on a: superseded
            6 grant #5 on a after 0 ms
        "#]],
    );
}
