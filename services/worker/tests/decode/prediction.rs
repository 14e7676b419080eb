//! Predictions of the client are drafted from the first token on, also again after a wrong part.

use refrain_protocol::TokenId;
use refrain_protocol::chunk::{DraftSource, Speculation};

use crate::bench::*;
use crate::fakes::FakeEngine;

const PROMPT: [TokenId; 3] = [1, 2, 3];

/// Number of steps, and of accepted and refused tokens of the prediction.
async fn predict(prediction: Vec<TokenId>, speculation: Speculation) -> (u64, u32, u32) {
    // A target without repetition, so that only the prediction can be drafted.
    let bench = bench(FakeEngine::new(counting), |_| {}).await;
    let mut request = chunk(&bench, &PROMPT, 200);
    request.prediction = prediction;
    request.speculation = speculation;
    let received = run(&bench, request).await;
    assert_eq!(received.tokens, plainly(counting, &PROMPT, 200));
    let series = |name: &str| {
        bench.figure(&format!(
            "refrain_spec_{name}_tokens_total{{model=\"fake\",scope=\"request\",source=\"prediction\"}}"
        ))
    };
    let (drafted, accepted) = (series("drafted") as u32, series("accepted") as u32);
    assert_eq!(
        accepted, received.accepted,
        "all drafts were the prediction's"
    );
    assert_eq!(
        drafted > 0,
        received.sources.contains(&DraftSource::Prediction)
    );
    (received.steps, accepted, drafted - accepted)
}

#[tokio::test]
async fn a_predicted_output_takes_few_steps() {
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
async fn a_prediction_is_found_again_after_a_wrong_part() {
    let mut prediction = plainly(counting, &PROMPT, 200);
    // A part is missing, a part is inserted, and a part is replaced.
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
