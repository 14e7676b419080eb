//! Rules of other systems on a few calls, worked out by hand. The rules themselves are compared with naive ones in
//! their files.

use serde_json::{Value, json};

use super::super::{Policy, ReplayReport};
use super::{counts, replay, song};

fn row(report: &ReplayReport, policy: Policy) -> (Option<f64>, Option<f64>) {
    let mut rows = report.policies.iter();
    let row = rows.find(|row| row.policy == policy).expect("compared");
    (row.tokens_per_step, row.head_share)
}

#[test]
fn prompt_lookup_copies_ten_tokens_of_the_request() -> anyhow::Result<()> {
    let calls = [json!({"prompt_token_ids": song(), "output_token_ids": song()})];
    let report = replay(&calls, "--preset pld --warm WARM")?;
    // The first token, then ten drafted tokens and the bonus token, then the three that are left.
    assert_eq!(counts(&report, "none"), [1, 0, 0, 1]);
    assert_eq!(counts(&report, "request"), [2, 20, 13, 14]);
    // Outputs of other requests are not used.
    assert_eq!(counts(&report, "global"), [0; 4]);
    assert_eq!(report.index_bytes_per_token, None);
    Ok(())
}

#[test]
fn sam_decoding_reads_on_from_the_longest_match() -> anyhow::Result<()> {
    let calls = [json!({"prompt_token_ids": song(), "output_token_ids": song()})];
    // After the first token, everything that follows that token in the prompt.
    let report = replay(&calls, "--preset sam")?;
    assert_eq!(counts(&report, "request"), [1, 14, 14, 14]);
    assert_eq!(counts(&report, "none"), [1, 0, 0, 1]);
    // The corpus has the warm outputs only; nothing is added during the replay.
    let calls = [
        json!({"output_token_ids": song()}),
        json!({"output_token_ids": song()}),
    ];
    let report = replay(&calls, "--preset sam --warm WARM")?;
    assert_eq!(counts(&report, "global"), [2, 28, 28, 28]);
    assert_eq!(counts(&replay(&calls, "--preset sam")?, "none")[0], 30);
    // The outputs of another tenant are not in this tenant's corpus.
    let calls = [
        json!({"tenant": "a", "output_token_ids": song()}),
        json!({"tenant": "b", "output_token_ids": (101..=115).collect::<Vec<u32>>()}),
    ];
    let report = replay(&calls, "--preset sam --warm WARM")?;
    assert_eq!(counts(&report, "global"), [2, 28, 28, 28]);
    Ok(())
}

#[test]
fn the_paper_draws_trees_of_as_many_nodes_as_the_pattern_has_tokens() -> anyhow::Result<()> {
    let copy = json!({"output_token_ids": song()});
    // A pattern of one token gives the root alone; patterns of 2, 4 and 8 draft 1, 3 and 7 tokens.
    let report = replay(&[copy.clone(), copy], "--preset paper")?;
    assert_eq!(counts(&report, "none"), [17, 0, 0, 17]);
    assert_eq!(counts(&report, "global"), [3, 11, 11, 13]);
    // Each copy first drafts 3. Once four tokens match, it drafts up to three nodes: 5 and 6, then 5, 6 and 7.
    let fork = |last: u32| json!({"output_token_ids": [1, 2, 3, 4, 5, last]});
    let report = replay(&[fork(6), fork(7), fork(7)], "--preset paper")?;
    assert_eq!(
        counts(&report, "global"),
        [4, 1 + 2 + 1 + 3, 1 + 1 + 1 + 2, 8]
    );
    Ok(())
}

#[test]
fn other_systems_stand_beside_ours() -> anyhow::Result<()> {
    let calls: Vec<Value> = (0..8)
        .map(|call| {
            let own = 100 + call..108 + call;
            json!({"prompt_token_ids": [call, 1], "output_token_ids": (1..=15).chain(own).collect::<Vec<u32>>()})
        })
        .collect();
    let report = replay(
        &calls,
        "--policies off,goodput,sam,pld,paper --warm WARM --eagle3 acc=0",
    )?;
    let share = |policy| row(&report, policy).1.expect("steps");
    // SAM decoding leaves matches of less than five tokens beyond its bias to the head; the paper leaves low scores
    // to it.
    assert!(share(Policy::Sam) > 0.0 && share(Policy::Sam) < 1.0);
    assert!(share(Policy::Paper) > 0.0 && share(Policy::Paper) < 1.0);
    assert_eq!(share(Policy::Pld), 0.0);
    // Without a comparison there is no head.
    assert_eq!(
        replay(&calls, "--preset sam --warm WARM")?
            .sources
            .get("eagle3"),
        None
    );

    let report = replay(&calls, "--preset sam --engine-model h100-8b")?;
    let compared: Vec<Policy> = report.policies.iter().map(|row| row.policy).collect();
    assert_eq!(compared, [&Policy::OWN[..], &[Policy::Sam]].concat());
    assert_eq!(report.tokens_per_step, row(&report, Policy::Sam).0);
    Ok(())
}
