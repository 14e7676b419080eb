//! The admin API: tenants and keys over HTTP, for operators with tokens.
//!
//! Its routes are on the operations listener. `operators` has the guard in front of all of them. `tenants`, `keys`,
//! `usage`, `figures`, `orders`, `store` and `trial` have the handlers, and `acts` carries acts out and logs them.

mod acts;
mod figure_sources;
mod figures;
mod keys;
mod operators;
mod orders;
mod state;
mod store;
mod tenants;
mod trial;
mod usage;

use std::sync::Arc;

use actix_web::{HttpResponse, web};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::{HttpError, get};

pub(crate) use figure_sources::FigureSources;
pub use operators::{OperatorConfig, OperatorToken};
pub(crate) use operators::{Operators, operator_faults};
pub(crate) use state::AdminState;

/// Adds the routes under `/admin`, behind a token of one of the operators.
pub(crate) fn routes(
    state: &Arc<AdminState>,
    operators: &Arc<Operators>,
    app: &mut web::ServiceConfig,
) {
    if operators.is_empty() {
        app.service(web::scope("/admin").default_service(web::to(no_operators)));
        return;
    }
    app.app_data(web::Data::from(state.clone())).service(
        web::scope("/admin")
            .wrap(operators::operators_only(operators.clone()))
            .service(tenants::all())
            .service(tenants::one())
            .service(keys::of_tenant())
            .service(keys::rotation())
            .service(keys::one())
            .service(get("/usage", usage::report))
            .service(get("/figures", figures::show))
            .service(orders::drain())
            .service(orders::erasures())
            .service(orders::compactions())
            .service(store::calls())
            .service(trial::chat()),
    );
}

async fn no_operators() -> Result<HttpResponse, HttpError> {
    let message = "this gateway has no operators, so it has no admin API: set gateway.operators; \
                   `refrain keys operator NAME` makes a token for one";
    let error = ApiError::new(ErrorKind::NotFound, message);
    Err(error.with_code("unknown_url").into())
}
