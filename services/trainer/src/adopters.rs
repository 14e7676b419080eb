//! The processes that adopt engines, and the choice of one for an engine that registers.

use std::sync::Arc;

use futures_util::future::join_all;
use refrain_protocol::adoption::AdopterReport;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::EngineAdopter;

/// The processes that adopt engines.
pub(super) struct Adopters {
    pub(super) adopters: Vec<Arc<dyn EngineAdopter>>,
    /// The turn of registrations, so that two engines do not take the same room.
    pub(super) turn: tokio::sync::Mutex<()>,
}

impl Adopters {
    pub(super) fn new(adopters: Vec<Arc<dyn EngineAdopter>>) -> Self {
        Adopters {
            adopters,
            turn: tokio::sync::Mutex::default(),
        }
    }

    /// The processes, of which there is at least one.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn any(&self) -> Result<&Self, ApiError> {
        if !self.adopters.is_empty() {
            return Ok(self);
        }
        let message = "engines cannot register here: no worker process adopts them; see worker.adoption and \
                       gateway.trainer.adopters";
        Err(ApiError::new(ErrorKind::NotFound, message).with_code("engines_not_adopted"))
    }

    /// The report of each process on its engines.
    pub(super) async fn reports(&self) -> Vec<Result<AdopterReport, ApiError>> {
        join_all(self.adopters.iter().map(|adopter| adopter.report())).await
    }
}

/// Chooses the process that adopts an engine: the one that has it, or else the one with the fewest engines.
///
/// # Errors
/// None of them serves the model, answers, or has room.
pub(super) fn choose(
    reports: &[Result<AdopterReport, ApiError>],
    model: &str,
    id: &str,
) -> Result<usize, ApiError> {
    let answered = reports.iter().enumerate();
    let answered = answered.filter_map(|(at, report)| Some((at, report.as_ref().ok()?)));
    let ours: Vec<_> = answered
        .filter(|(_, report)| report.model == model)
        .collect();
    let has_it = |report: &AdopterReport| report.engines.iter().any(|engine| engine.id == id);
    if let Some((at, _)) = ours.iter().find(|(_, report)| has_it(report)) {
        return Ok(*at);
    }
    let has_room = |report: &AdopterReport| report.engines.len() < report.engines_max as usize;
    let free = ours.iter().filter(|(_, report)| has_room(report));
    if let Some((at, _)) = free.min_by_key(|(_, report)| report.engines.len()) {
        return Ok(*at);
    }
    if !ours.is_empty() {
        let message = "no worker process has room for another engine; raise worker.adoption.engines_max, or remove \
                       engines";
        return Err(ApiError::new(ErrorKind::Overloaded, message).with_code("engines_limit"));
    }
    match reports.iter().find_map(|report| report.as_ref().err()) {
        Some(error) => Err(error.clone()),
        None => {
            let message = format!(
                "no worker process adopts engines of the model {model}; see worker.engine.model"
            );
            Err(ApiError::new(ErrorKind::NotFound, message).with_code("engines_not_adopted"))
        }
    }
}

#[cfg(test)]
mod tests {
    use refrain_protocol::WorkerId;
    use refrain_protocol::adoption::AdoptedEngine;

    use super::*;

    fn report(model: &str, engines_max: u32, ids: &[&str]) -> Result<AdopterReport, ApiError> {
        let engine = |id: &&str| AdoptedEngine {
            id: (*id).into(),
            url: format!("http://{id}"),
            worker: WorkerId(format!("w@{id}")),
            running: 0,
            weight_version: 0,
            fault: None,
        };
        Ok(AdopterReport {
            model: model.into(),
            engines_max,
            engines: ids.iter().map(engine).collect(),
        })
    }

    fn away() -> Result<AdopterReport, ApiError> {
        Err(ApiError::new(ErrorKind::Unavailable, "away"))
    }

    #[test]
    fn an_engine_goes_to_the_process_that_has_it_or_to_the_one_with_the_fewest() {
        let reports = [
            report("m", 4, &["a:1", "b:1"]),
            report("m", 4, &["c:1"]),
            report("other", 4, &[]),
            report("m", 4, &["d:1"]),
            away(),
        ];
        assert_eq!(choose(&reports, "m", "new:1"), Ok(1));
        for (id, at) in [("b:1", 0), ("c:1", 1), ("d:1", 3)] {
            assert_eq!(choose(&reports, "m", id), Ok(at));
        }
        assert_eq!(choose(&reports, "other", "b:1"), Ok(2));
    }

    #[test]
    fn an_error_says_why_no_process_takes_an_engine() {
        let code = |reports: &[_]| choose(reports, "m", "new:1").unwrap_err();
        let full = [report("m", 1, &["a:1"]), report("other", 4, &[])];
        assert!(code(&full).has_code("engines_limit"));
        // A repeat finds its place also where there is no room.
        assert_eq!(choose(&full, "m", "a:1"), Ok(0));
        let others = [report("other", 4, &[])];
        assert!(code(&others).has_code("engines_not_adopted"));
        assert_eq!(code(&[report("other", 4, &[]), away()]).message, "away");
    }
}
