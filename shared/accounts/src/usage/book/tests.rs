use super::*;

const HOUR_MS: u64 = 3_600_000;

fn subject(tenant: &str) -> UsageSubject {
    UsageSubject {
        tenant: tenant.into(),
        key: "k".into(),
        model: "m".into(),
    }
}

fn counts(output_tokens: u64) -> UsageCounts {
    UsageCounts {
        requests: 1,
        input_tokens: 5,
        output_tokens,
        ..UsageCounts::default()
    }
}

fn begin(request: u64, tenant: &str) -> Record {
    Record::Begin {
        request,
        subject: subject(tenant),
    }
}

fn progress(request: u64, at_ms: u64, output_tokens: u64) -> Record {
    Record::Progress {
        request,
        at_ms,
        counts: counts(output_tokens),
    }
}

fn end(request: u64, at_ms: u64, output_tokens: u64) -> Record {
    Record::End {
        request,
        at_ms,
        counts: counts(output_tokens),
    }
}

fn book(records: &[Record]) -> Book {
    let mut book = Book::default();
    for record in records {
        book.apply(record.clone());
    }
    book
}

/// Hour, tenant, requests, input and output of each row.
fn sums(book: &Book) -> Vec<(u32, String, u64, u64, u64)> {
    let rows = book.rows().map(|UsageRow { id, total }| {
        let counts = total.counts;
        (
            id.hour,
            id.tenant,
            counts.requests,
            counts.input_tokens,
            counts.output_tokens,
        )
    });
    rows.collect()
}

#[test]
fn a_request_counts_in_the_hours_in_which_its_tokens_were_made() {
    let records = [
        begin(1, "a"),
        progress(1, HOUR_MS - 1, 100),
        progress(1, HOUR_MS + 1, 250),
        // A late record and a repeated one add nothing.
        progress(1, HOUR_MS + 1, 200),
        progress(1, HOUR_MS + 1, 250),
        end(1, 2 * HOUR_MS, 260),
        end(1, 2 * HOUR_MS, 900),
    ];
    let expected = [(0, 1, 5, 100), (1, 0, 0, 150), (2, 0, 0, 10)];
    let expected = expected
        .map(|(hour, requests, input, output)| (hour, "a".to_owned(), requests, input, output));
    assert_eq!(sums(&book(&records)), expected);
}

#[test]
fn requests_that_ran_when_the_gateway_was_killed_are_settled_with_their_last_progress() {
    let records = vec![
        begin(1, "a"),
        progress(1, 5, 40),
        begin(2, "b"),
        Record::Whole {
            subject: subject("a"),
            at_ms: 7,
            counts: counts(3),
        },
    ];
    let mut book = Book::recovered(9, records);
    assert_eq!(sums(&book), [(0, "a".to_owned(), 2, 10, 43)]);
    // Another request may have the same number then.
    book.apply(progress(1, 9, 100));
    book.apply(begin(1, "b"));
    book.apply(end(1, 9, 6));
    assert_eq!(sums(&book)[1], (0, "b".to_owned(), 1, 5, 6));
    assert_eq!(book.rows().next().unwrap().id.gateway, 9);
}

#[test]
fn a_rewritten_file_has_the_same_totals_and_running_requests() {
    let records = [
        begin(1, "a"),
        progress(1, 5, 40),
        begin(2, "b"),
        end(2, 6, 10),
        Record::Erased {
            tenant: "b".into(),
            at_ms: 100,
        },
    ];
    let mut before = book(&records);
    let rewritten: Vec<Record> = before.records().collect();
    let mut after = book(&rewritten);
    for book in [&mut before, &mut after] {
        book.apply(end(1, 7, 50));
        book.apply(begin(3, "b"));
        book.apply(end(3, 50, 1));
    }
    let rows = |book: &Book| book.rows().collect::<Vec<_>>();
    assert_eq!(rows(&before), rows(&after));
    assert_eq!(
        sums(&after),
        [(0, "a".into(), 1, 5, 50), (0, "b".into(), 1, 5, 1)]
    );
    assert_eq!(after.rows().nth(1).unwrap().total.began_ms, 101);
}

#[test]
fn each_reader_gets_what_changed_since_it_last_asked() {
    let mut book = book(&[
        begin(1, "a"),
        progress(1, 5, 40),
        begin(2, "b"),
        progress(2, 5, 1),
    ]);
    let (rows, first) = book.changed(0, 1);
    assert_eq!(rows[0].id.tenant, "a");
    let (rows, second) = book.changed(first, 10);
    assert_eq!((rows.len(), &*rows[0].id.tenant), (1, "b"));
    assert_eq!(book.changed(second, 10), (Vec::new(), second));
    book.apply(progress(1, 6, 41));
    assert_eq!(book.changed_count(second), 1);
    assert_eq!(book.changed(second, 10).0[0].total.counts.output_tokens, 41);
    assert_eq!(book.changed(0, 10).0.len(), 2);
}

#[test]
fn erased_rows_do_not_come_back_and_a_running_request_goes_on() {
    let mut book = book(&[
        begin(1, "a"),
        progress(1, 5, 40),
        begin(2, "b"),
        end(2, 5, 7),
    ]);
    assert!(book.is_new_erasure("a", 50));
    book.apply(Record::Erased {
        tenant: "a".into(),
        at_ms: 50,
    });
    assert!(!book.is_new_erasure("a", 50));
    assert_eq!(sums(&book), [(0, "b".to_owned(), 1, 5, 7)]);
    assert_eq!(book.changed_count(0), 1);
    // This clock is behind that of the store.
    book.apply(progress(1, 20, 45));
    let row = book.rows().next().unwrap();
    assert_eq!(
        (row.total.began_ms, row.total.counts.output_tokens),
        (51, 5)
    );
}

#[test]
fn old_rows_are_forgotten_once_they_are_sent_and_still_count_in_their_month() {
    let start = refrain_protocol::usage::parse_hour("2027-05-01").unwrap();
    let hour_ms = |hour: u32| u64::from(start + hour) * HOUR_MS;
    let mut book = book(&[
        begin(1, "a"),
        progress(1, hour_ms(1), 1),
        progress(1, hour_ms(5), 2),
    ]);
    let (_, sent) = book.changed(0, 1);
    book.apply(end(1, hour_ms(9), 3));
    let hours = |book: &Book| {
        let rows = book.rows().map(|row| row.id.hour - start);
        rows.collect::<Vec<_>>()
    };
    assert_eq!(book.forget(start + 9 + KEPT_HOURS, sent), 0);
    assert_eq!(hours(&book), [5, 9], "only the first was sent");
    let again: Vec<Record> = book.records().collect();
    let again = Book::recovered(0, again);
    let forgotten: Vec<_> = again.forgotten().collect();
    // It is the month before the one after next.
    assert_eq!(forgotten, []);
    assert_eq!(
        book.forget(start + 6 + GIVEN_UP_HOURS, sent),
        1,
        "it was never sent"
    );
    assert_eq!((hours(&book), book.changes.len()), (vec![9], 1));
}

#[test]
fn forgotten_rows_count_in_the_budgets_of_their_month() {
    let start = refrain_protocol::usage::parse_hour("2027-04-01").unwrap();
    let now = start + 20 * 24;
    let row_ms = u64::from(start) * HOUR_MS;
    let mut book = book(&[begin(1, "a"), end(1, row_ms, 30)]);
    book.apply(begin(2, "b"));
    book.apply(end(2, u64::from(now) * HOUR_MS, 1));
    // As if there were many rows.
    let sent = book.last_change;
    assert_eq!(book.forget_before(now - KEPT_HOURS_MIN, 0, now, sent), 0);
    let again = Book::recovered(0, book.records().collect());
    let month = Period::Month.number(start);
    assert_eq!(
        again.forgotten().collect::<Vec<_>>(),
        [(month, "a", "k", 35)]
    );
    assert_eq!(again.len(), 1);
}
