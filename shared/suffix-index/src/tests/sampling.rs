//! Tests of patterns that occur more often than `samples_max`.

use super::*;

fn limits(samples_max: usize) -> SearchLimits {
    SearchLimits {
        samples_max,
        ..SearchLimits::EXACT
    }
}

/// Several segments of text over a small alphabet. Patterns have all frequencies, and intervals cover many fences.
fn sealed(alphabet: u32, segments: usize) -> (Index, Vec<Vec<Token>>) {
    let mut index = Index::new(IndexConfig::default());
    let mut documents = Vec::new();
    for segment in 0..segments {
        for _ in 0..20 {
            let number = documents.len();
            let document = random(400 * (segment + 1), alphabet, number as u32 + 1);
            index.open(key(number), &[]).expect("free");
            index.append(key(number), &document).expect("open");
            documents.push(document);
        }
        index.seal(|_| true).expect("room");
    }
    (index, documents)
}

/// The token after each occurrence. Occurrences are sorted by the text before them, read backwards.
fn followers(documents: &[Vec<Token>], pattern: &[Token]) -> Vec<Token> {
    let mut found: Vec<(Vec<Token>, Token)> = Vec::new();
    for document in documents {
        for (at, window) in document.windows(pattern.len() + 1).enumerate() {
            if window.starts_with(pattern) {
                let left: Vec<Token> = document[..at].iter().rev().copied().collect();
                found.push((left, window[pattern.len()]));
            }
        }
    }
    found.sort();
    found.into_iter().map(|(_, token)| token).collect()
}

/// The length of each match, the sum of its counts, and the count of each token.
type Counted = (u32, u64, Vec<(Token, u32)>);

fn matches(index: &Index, context: &[Token], limits: SearchLimits) -> Vec<Counted> {
    let mut search = index.search(Cursor::default(), context, limits);
    let mut matches = Vec::new();
    while let Some(found) = search.next_match() {
        let mut next = Vec::new();
        let total = search.continuations(&found.node, &mut next);
        let pairs = next.iter().map(|next| (next.token, next.count)).collect();
        matches.push((found.len, total, pairs));
    }
    matches
}

#[test]
fn all_read_is_all_counted() {
    for alphabet in [2, 5, 50] {
        let (index, documents) = sealed(alphabet, 3);
        for seed in 100..110 {
            let context = random(20, alphabet, seed);
            let mut longer = 0;
            for (len, total, pairs) in matches(&index, &context, SearchLimits::EXACT) {
                let pattern = &context[context.len() - len as usize..];
                let followers = followers(&documents, pattern);
                assert_eq!(total, followers.len() as u64, "{pattern:?}");
                assert!(
                    total > longer,
                    "a match must have more occurrences than the longer one"
                );
                longer = total;
                for (token, count) in pairs {
                    let truth = followers.iter().filter(|&&other| other == token).count();
                    assert_eq!(count as usize, truth);
                }
            }
        }
    }
}

/// The total is that of all occurrences, except at the ends of large intervals. The count of a token is wrong by at
/// most one sample's weight for each run of it: evenly spaced samples allow no better bound. The nearest neighbours,
/// in contrast, could all be of one run.
#[test]
fn samples_are_wrong_by_no_more_than_their_spacing() {
    let mut large = 0;
    for alphabet in [2, 5, 50] {
        // With a single segment, all occurrences have one order.
        let (index, documents) = sealed(alphabet, 1);
        for (seed, samples_max) in (100..120).zip([8, 32].into_iter().cycle()) {
            let context = random(20, alphabet, seed);
            for (len, total, pairs) in matches(&index, &context, limits(samples_max)) {
                let pattern = &context[context.len() - len as usize..];
                let followers = followers(&documents, pattern);
                let all = followers.len() as u64;
                assert!(total <= all && all * 4 <= total * 5, "{total} of {all}");
                if all as usize <= samples_max {
                    assert_eq!(total, all);
                }
                large += u64::from(all > 1000);
                let weight = total.div_ceil(samples_max as u64);
                for (token, count) in pairs {
                    let runs = followers.chunk_by(|one, next| one == next);
                    let runs = runs.filter(|run| run[0] == token).count() as u64;
                    let truth = followers.iter().filter(|&&other| other == token).count() as u64;
                    let wrong = truth.abs_diff(count.into());
                    assert!(
                        wrong <= (runs + 1) * weight + (all - total),
                        "{wrong} of {truth}"
                    );
                }
            }
        }
    }
    assert!(large > 50, "{large}: the test needs large intervals");
}

/// "b" is followed by X a thousand times and by Y ten thousand times. If the nearest neighbours of a context that
/// ends with "ab" were the sample, X would always follow, even for the pattern "b".
#[test]
fn the_nearest_are_not_a_sample() {
    let mut index = Index::new(IndexConfig::default());
    let mut document = Vec::new();
    for at in 0..11_000u32 {
        let (before, after) = if at % 11 == 0 {
            (500, 1)
        } else {
            (600 + at % 300, 2)
        };
        document.extend([before, 7, after]);
    }
    index.open(key(0), &[]).expect("free");
    index.append(key(0), &document).expect("open");
    index.seal(|_| true).expect("room");
    let found = matches(&index, &[500, 7], limits(32));
    let (len, total, pairs) = &found[0];
    assert_eq!((*len, pairs.len()), (2, 1));
    assert!((800..=1000).contains(total), "{total}");
    let (len, total, pairs) = &found[1];
    assert_eq!((*len, pairs[0].0, pairs[1].0), (1, 2, 1));
    let share = f64::from(pairs[0].1) / *total as f64;
    assert!((share - 10.0 / 11.0).abs() < 0.05, "{share}");
}

/// For a short pattern with many continuations, the work is bounded by the samples.
#[test]
fn short_patterns_cost_no_more_than_their_samples() {
    let mut index = Index::new(IndexConfig::default());
    let document: Vec<Token> = (0..20_000).flat_map(|at| [1, 2 + at % 5_000]).collect();
    index.open(key(0), &[]).expect("free");
    index.append(key(0), &document).expect("open");
    index.seal(|_| true).expect("room");
    let mut search = index.search(Cursor::default(), &[9, 1], limits(32));
    let found = search.next_match().expect("a match");
    let (pairs, _) = continuations(&mut search, &found.node);
    assert!(pairs.len() <= 32);
    assert!(search.entries_read() < 200, "{}", search.entries_read());
}

/// If the last two tokens never occur together, no search is needed: only a sample for the last token is read.
#[test]
fn pairs_that_never_occur_are_not_searched_for() {
    let mut builder = crate::SegmentBuilder::new();
    let document: Vec<Token> = (0..50_000).flat_map(|at| [1, 2 + at % 50]).collect();
    builder.add(key(0), [], document.iter().copied());
    let mut index = Index::new(IndexConfig::default());
    index.mount(Arc::new(builder.build().expect("one key")), []);
    let mut unseen = 0;
    for before in 100..200 {
        let context = [3, before, 1];
        let mut search = index.search(Cursor::default(), &context, limits(32));
        let found = search.next_match().expect("a match");
        let (pairs, _) = continuations(&mut search, &found.node);
        assert_eq!((found.len, found.next_len), (1, 0));
        assert_eq!(pairs.iter().map(|pair| pair.1).sum::<u32>(), 50_000);
        unseen += usize::from(search.entries_read() <= 32);
    }
    // The filter lets some other pairs pass, and those are searched for.
    assert!(unseen > 50, "{unseen}");
}

/// The origins of samples are right, although only their next tokens were read at first.
#[test]
fn origins_of_samples_are_right() {
    for alphabet in [2, 5, 50] {
        let (index, documents) = sealed(alphabet, 3);
        let mut origins = 0;
        for seed in 100..120 {
            let context = random(20, alphabet, seed);
            let mut search = index.search(Cursor::default(), &context, limits(16));
            while let Some(found) = search.next_match() {
                let pattern = &context[context.len() - found.len as usize..];
                let mut next = Vec::new();
                search.continuations(&found.node, &mut next);
                for next in next {
                    let Origin { document, position } =
                        index.origin(next.sighting).expect("a document");
                    let text = &documents[document.0 as usize];
                    let (before, from) = text.split_at(position as usize);
                    assert!(before.ends_with(pattern) && from[0] == next.token);
                    origins += 1;
                    let mut after = Vec::new();
                    search.continuations(&next.node, &mut after);
                    for after in after {
                        let origin = index.origin(after.sighting).expect("a document");
                        let text = &documents[origin.document.0 as usize];
                        let (before, from) = text.split_at(origin.position as usize);
                        assert!(before.ends_with(&[pattern, &[next.token]].concat()));
                        assert_eq!(from[0], after.token);
                    }
                }
            }
        }
        assert!(origins > 100, "{origins}");
    }
}

/// The work of a search grows with the logarithm of the text, and not with the pattern.
#[test]
fn a_search_looks_at_few_entries() {
    let mut read = Vec::new();
    for len in [10_000, 100_000, 1_000_000] {
        let mut builder = crate::SegmentBuilder::new();
        let document = random(len, 1000, 3);
        builder.add(key(0), [], document.iter().copied());
        let mut index = Index::new(IndexConfig::default());
        index.mount(Arc::new(builder.build().expect("one key")), []);
        let mut most = 0;
        for at in (1000..9000).step_by(100) {
            for pattern_len in [1, 2, 8, 64] {
                let context = [&[77_777], &document[at..at + pattern_len]].concat();
                let mut search = index.search(Cursor::default(), &context, limits(32));
                while search.next_match().is_some() {}
                most = most.max(search.entries_read());
            }
        }
        read.push(most);
    }
    assert!(read[2] <= read[0] + 100, "{read:?}");
    assert!(read[2] <= 300, "{read:?}");
}

#[test]
fn masked_documents_do_not_weigh_in_samples() {
    let (mut index, documents) = sealed(5, 1);
    let gone: Vec<usize> = (0..documents.len())
        .filter(|number| number % 2 == 0)
        .collect();
    index.remove(&gone.iter().map(|&number| key(number)).collect::<Vec<_>>());
    let left: Vec<Vec<Token>> = documents.iter().skip(1).step_by(2).cloned().collect();
    let context = random(20, 5, 7);
    for (len, total, _) in matches(&index, &context, limits(64)) {
        let all = followers(&left, &context[context.len() - len as usize..]).len() as f64;
        // About half of the samples are of masked documents.
        assert!(
            (total as f64 - all).abs() <= 0.3 * all + 6.0,
            "{total} of {all}"
        );
    }
    for (len, total, _) in matches(&index, &context, SearchLimits::EXACT) {
        let all = followers(&left, &context[context.len() - len as usize..]).len() as u64;
        assert_eq!(total, all);
    }
}
