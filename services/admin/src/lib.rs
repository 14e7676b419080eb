//! The admin API and the console of a gateway: tenants, keys, usage and orders, for operators with tokens.
//!
//! Its routes are on the operations listener of a gateway, under `/admin`. `operators` has the guard in front of all
//! of them. `tenants`, `keys`, `usage`, `figures`, `orders`, `store` and `trial` have the handlers, and `acts`
//! carries acts out and logs them. `console` is a page that calls them. The gateway is not known here: a function
//! passes on the chat that an operator tries.
//!
//! Read first: `operators.rs`, then `acts.rs`.

mod acts;
mod console;
mod figure_sources;
mod figures;
mod keys;
mod operators;
mod orders;
mod parts;
mod state;
mod store;
mod tenants;
mod trial;
mod usage;

use std::sync::Arc;

use actix_web::{HttpResponse, web};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::{HttpError, get};

use figure_sources::NewestFigures;
use operators::Operators;
use state::{AdminFamilies, AdminState};

pub use parts::AdminParts;
pub use trial::TrialChat;

/// The admin API and the console. Cheap to clone.
#[derive(Clone)]
pub struct AdminApi {
    state: Arc<AdminState>,
    operators: Arc<Operators>,
}

impl AdminApi {
    /// Creates the API.
    ///
    /// # Errors
    /// The registry has one of its metrics already.
    pub fn new(parts: AdminParts) -> anyhow::Result<Self> {
        let families = AdminFamilies::register(parts.metrics.registry())?;
        let refusals = families.admin_token_refusals.clone();
        let operators = Operators::new(&parts.operators, refusals);
        Ok(AdminApi {
            operators: Arc::new(operators),
            state: Arc::new(AdminState {
                parts,
                families,
                figures: NewestFigures::default(),
            }),
        })
    }

    /// Adds the routes under `/admin`, behind a token of one of the operators, and the page under `/console`.
    pub fn routes(&self, app: &mut web::ServiceConfig) {
        let parts = &self.state.parts;
        if parts.has_console {
            console::routes(app);
        }
        if self.operators.is_empty() {
            app.service(web::scope("/admin").default_service(web::to(no_operators)));
            return;
        }
        app.app_data(web::Data::from(self.state.clone())).service(
            web::scope("/admin")
                .wrap(operators::operators_only(self.operators.clone()))
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
                .service(trial::chat(parts.trial.clone())),
        );
    }
}

async fn no_operators() -> Result<HttpResponse, HttpError> {
    let message = "this gateway has no operators, so it has no admin API: set gateway.operators; \
                   `refrain keys operator NAME` makes a token for one";
    let error = ApiError::new(ErrorKind::NotFound, message);
    Err(error.with_code("unknown_url").into())
}
