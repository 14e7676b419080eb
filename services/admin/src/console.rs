//! The console: a page for operators, on the operations listener.
//!
//! Its files are in the binary. They hold nothing secret, so they are served to whoever reaches the listener.
//! Its data come from the admin API, which needs the token of an operator.

use actix_web::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, LOCATION, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use actix_web::{HttpResponse, web};

/// The browser may load files of this listener alone, and call nothing else. No page may show this one in a frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A file of the page.
struct File {
    path: &'static str,
    kind: &'static str,
    text: &'static str,
}

macro_rules! files {
    ($($path:literal as $kind:literal),+ $(,)?) => {
        &[$(File { path: $path, kind: $kind, text: include_str!(concat!("console/", $path)) }),+]
    };
}

const FILES: &[File] = files![
    "page.html" as "text/html; charset=utf-8",
    "console.css" as "text/css; charset=utf-8",
    "icon.svg" as "image/svg+xml",
    "main.js" as "text/javascript; charset=utf-8",
    "api.js" as "text/javascript; charset=utf-8",
    "chart.js" as "text/javascript; charset=utf-8",
    "dialogs.js" as "text/javascript; charset=utf-8",
    "elements.js" as "text/javascript; charset=utf-8",
    "figures.js" as "text/javascript; charset=utf-8",
    "format.js" as "text/javascript; charset=utf-8",
    "overview.js" as "text/javascript; charset=utf-8",
    "store.js" as "text/javascript; charset=utf-8",
    "tenants.js" as "text/javascript; charset=utf-8",
    "trial.js" as "text/javascript; charset=utf-8",
    "workers.js" as "text/javascript; charset=utf-8",
];

/// Adds the routes of the page.
pub(crate) fn routes(app: &mut web::ServiceConfig) {
    // The names of files are relative to the folder, so the address of the page ends with a slash.
    let moved = || async {
        HttpResponse::PermanentRedirect()
            .insert_header((LOCATION, "/console/"))
            .finish()
    };
    app.route("/console", web::get().to(moved));
    for file in FILES {
        let path = match file.path {
            "page.html" => "/console/".to_owned(),
            path => format!("/console/{path}"),
        };
        let show = move || std::future::ready(response(file));
        app.route(&path, web::get().to(show));
    }
}

fn response(file: &File) -> HttpResponse {
    HttpResponse::Ok()
        .insert_header((CONTENT_TYPE, file.kind))
        .insert_header((CONTENT_SECURITY_POLICY, POLICY))
        .insert_header((X_FRAME_OPTIONS, "DENY"))
        .insert_header((X_CONTENT_TYPE_OPTIONS, "nosniff"))
        .insert_header((REFERRER_POLICY, "no-referrer"))
        // Another version of the binary has other files.
        .insert_header((CACHE_CONTROL, "no-cache"))
        .body(file.text)
}

/// The text of each module of the page.
#[cfg(test)]
pub(crate) fn modules() -> impl Iterator<Item = &'static str> {
    let modules = FILES.iter().filter(|file| file.path.ends_with(".js"));
    modules.map(|file| file.text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_no_foreign_host_and_only_files_that_are_there() {
        for file in FILES {
            // The namespace of SVG is a name and no address.
            let text = file.text.replace("http://www.w3.org/2000/svg", "");
            assert!(!text.contains("://"), "{} names a host", file.path);
            let names = text.split(['"', '\'']);
            let named = names.filter_map(|name| name.strip_prefix("./"));
            for name in named {
                let is_there = FILES.iter().any(|file| file.path == name);
                assert!(is_there, "{} names {name}", file.path);
            }
        }
    }
}
