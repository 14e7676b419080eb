//! What the client predicts is drafted, from the first token on, and found again after it was wrong.

use refrain_protocol::TokenId;
use refrain_protocol::chunk::{DraftSource, Speculation};

use crate::bench::*;
use crate::fakes::FakeEngine;

const PROMPT: [TokenId; 3] = [1, 2, 3];

/// Steps, accepted and refused tokens of the prediction.
async fn predict(prediction: Vec<TokenId>, speculation: Speculation) -> (u64, u32, u32) {
    // Says nothing twice, so there is nothing else to draft from.
    let bench = bench(FakeEngine::new(counting), |_| {}).await;
    let mut request = chunk(&bench, &PROMPT, 200);
    request.prediction = prediction;
    request.speculation = speculation;
    let said = run(&bench, request).await;
    assert_eq!(said.tokens, plainly(counting, &PROMPT, 200));
    let series = |name: &str| {
        bench.figure(&format!(
            "refrain_spec_{name}_tokens_total{{model=\"fake\",scope=\"request\",source=\"prediction\"}}"
        ))
    };
    let (drafted, accepted) = (series("drafted") as u32, series("accepted") as u32);
    assert_eq!(accepted, said.accepted, "all drafts were the prediction's");
    assert_eq!(drafted > 0, said.sources.contains(&DraftSource::Prediction));
    (said.steps, accepted, drafted - accepted)
}

#[tokio::test]
async fn an_output_that_was_predicted_comes_in_few_steps() {
    let output = plainly(counting, &PROMPT, 200);
    for speculation in [Speculation::Auto, Speculation::Suffix] {
        let (steps, accepted, refused) = predict(output.clone(), speculation).await;
        assert!(steps < 200 / 8, "{steps} steps");
        assert_eq!(u64::from(accepted), 200 - steps);
        assert!(refused < 8, "{refused} refused");
    }
    assert_eq!(predict(output, Speculation::Off).await, (200, 0, 0));
}

#[tokio::test]
async fn a_prediction_that_goes_astray_is_found_again() {
    let mut prediction = plainly(counting, &PROMPT, 200);
    // Something left out, something put in, something replaced.
    prediction.drain(40..50);
    prediction.splice(80..80, [7, 7, 7, 8, 8]);
    prediction[120] = 9;
    let (steps, accepted, _) = predict(prediction, Speculation::Auto).await;
    assert!(
        steps < 60 && accepted > 140,
        "{steps} steps, {accepted} accepted"
    );
}

#[tokio::test]
async fn a_wrong_prediction_changes_nothing() {
    let (steps, accepted, refused) = predict(vec![900; 300], Speculation::Auto).await;
    assert_eq!((steps, accepted), (200, 0));
    assert!(refused < 40, "{refused} refused");
}
