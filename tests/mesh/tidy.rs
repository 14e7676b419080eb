//! Rules for the repository itself: the direction of dependencies, the length of files, circles of modules, comments,
//! and lines that no code has.

mod comments;
mod module_circles;
mod production_lines;
mod rust_source;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use e2e::repository;
use serde_json::Value;

/// The packages of the workspace and their dependencies, except those for tests only. Keys are cargo's ids.
struct Graph {
    names: BTreeMap<String, String>,
    /// The folders of workspace members.
    folders: BTreeMap<String, PathBuf>,
    uses: BTreeMap<String, BTreeSet<String>>,
}

impl Graph {
    fn load() -> anyhow::Result<Self> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        // Offline works, because this test was built from all packages of the platform.
        let output = std::process::Command::new(cargo)
            .args([
                "metadata",
                "--format-version",
                "1",
                "--offline",
                "--filter-platform",
                &platform,
            ])
            .current_dir(repository())
            .output()?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let metadata: Value = serde_json::from_slice(&output.stdout)?;
        let members: BTreeSet<&str> = list(&metadata["workspace_members"])
            .filter_map(Value::as_str)
            .collect();
        let mut graph = Graph {
            names: BTreeMap::new(),
            folders: BTreeMap::new(),
            uses: BTreeMap::new(),
        };
        for package in list(&metadata["packages"]) {
            let id = text(&package["id"])?;
            graph.names.insert(id.clone(), text(&package["name"])?);
            if members.contains(id.as_str()) {
                let manifest = PathBuf::from(text(&package["manifest_path"])?);
                let folder = manifest.parent().context("a manifest without a folder")?;
                graph.folders.insert(
                    id,
                    folder
                        .strip_prefix(repository().canonicalize()?)?
                        .to_owned(),
                );
            }
        }
        for node in list(&metadata["resolve"]["nodes"]) {
            let is_used =
                |used: &&Value| list(&used["dep_kinds"]).any(|kind| kind["kind"] != "dev");
            let used = list(&node["deps"])
                .filter(is_used)
                .map(|used| text(&used["pkg"]));
            graph
                .uses
                .insert(text(&node["id"])?, used.collect::<anyhow::Result<_>>()?);
        }
        Ok(graph)
    }

    /// The names of all direct and indirect dependencies of a member.
    fn reached(&self, from: &str) -> BTreeSet<&str> {
        let mut seen = BTreeSet::new();
        let mut next = vec![from];
        while let Some(id) = next.pop() {
            for used in self.uses.get(id).into_iter().flatten() {
                if seen.insert(used.as_str()) {
                    next.push(used);
                }
            }
        }
        seen.iter()
            .filter_map(|id| self.names.get(*id))
            .map(String::as_str)
            .collect()
    }

    fn members_in(&self, folder: &str) -> Vec<(&str, BTreeSet<&str>)> {
        let members = self
            .folders
            .iter()
            .filter(|(_, place)| place.starts_with(folder));
        members
            .map(|(id, _)| (self.names[id].as_str(), self.reached(id)))
            .collect()
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> anyhow::Result<String> {
    Ok(value
        .as_str()
        .context("cargo metadata has another form")?
        .to_owned())
}

/// Packages that may depend on services: the binary, and the measurements that it runs.
const ABOVE_SERVICES: [&str; 2] = ["refrain", "refrain-lab"];

/// A service that may depend on another one: the listener for trainers is a part of a gateway's process.
const GUEST: (&str, &str) = ("refrain-trainer", "refrain-gateway");

#[test]
fn dependencies_point_one_way() -> anyhow::Result<()> {
    let graph = Graph::load()?;
    let services = graph.members_in("services");
    let names: BTreeSet<&str> = services.iter().map(|(name, _)| *name).collect();
    let shared = graph.members_in("shared");
    ensure!(
        names.len() >= 6 && shared.len() >= 6,
        "members are missing: {names:?}"
    );
    for (name, reached) in &shared {
        let wrong: Vec<_> = reached.intersection(&names).collect();
        ensure!(wrong.is_empty(), "{name} is shared and uses {wrong:?}");
    }
    for (name, reached) in services
        .iter()
        .filter(|(name, _)| !ABOVE_SERVICES.contains(name))
    {
        let used = reached.intersection(&names);
        let wrong: Vec<_> = used.filter(|used| (*name, **used) != GUEST).collect();
        ensure!(
            wrong.is_empty(),
            "{name} uses {wrong:?}: services reach each other through shared/rpc"
        );
    }
    Ok(())
}

#[test]
fn heavy_crates_stay_where_they_belong() -> anyhow::Result<()> {
    let graph = Graph::load()?;
    let all: Vec<_> = ["shared", "services"]
        .iter()
        .flat_map(|folder| graph.members_in(folder))
        .collect();
    let pure = [
        "refrain-suffix-index",
        "refrain-speculation",
        "refrain-output-parsers",
    ];
    let heavy = [
        "tokio",
        "actix",
        "actix-rt",
        "actix-web",
        "reqwest",
        "hyper",
        "sled",
        "tokenizers",
        "safetensors",
    ];
    let unused: Vec<_> = heavy
        .iter()
        .filter(|crate_name| {
            all.iter()
                .all(|(_, reached)| !reached.contains(**crate_name))
        })
        .collect();
    ensure!(
        unused.is_empty(),
        "nothing reaches {unused:?}: the test is blind"
    );
    for (name, reached) in all.iter().filter(|(name, _)| pure.contains(name)) {
        let wrong: Vec<_> = heavy
            .iter()
            .filter(|crate_name| reached.contains(**crate_name))
            .collect();
        ensure!(
            wrong.is_empty(),
            "{name} is to stay pure and reaches {wrong:?}"
        );
    }
    for (crate_name, owner) in [
        ("safetensors", "refrain-reference-engine"),
        ("sled", "refrain-draft-store"),
    ] {
        let reach: Vec<_> = all
            .iter()
            .filter(|(_, reached)| reached.contains(crate_name))
            .collect();
        // The binary contains all services.
        let wrong: Vec<_> = reach
            .iter()
            .map(|(name, _)| *name)
            .filter(|name| *name != owner && *name != "refrain")
            .collect();
        ensure!(wrong.is_empty(), "{wrong:?} reach {crate_name}");
        ensure!(
            reach.len() == 2,
            "{crate_name} is reached by {} packages: the test is blind",
            reach.len()
        );
    }
    Ok(())
}

const LINES_MAX: usize = 700;

#[test]
fn no_file_is_too_long_to_read() -> anyhow::Result<()> {
    let mut long = Vec::new();
    let mut files = 0;
    let mut folders: Vec<PathBuf> = ["shared", "services", "tests"]
        .map(|name| repository().join(name))
        .into();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let entry = entry?;
            let path = entry.path();
            if entry.file_type()?.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files += 1;
                let lines = lines(&path)?;
                if lines > LINES_MAX {
                    long.push(format!("{}: {lines} lines", path.display()));
                }
            }
        }
    }
    ensure!(files > 100, "{files} files looked at: the test is blind");
    ensure!(
        long.is_empty(),
        "more than {LINES_MAX} lines:\n{}",
        long.join("\n")
    );
    Ok(())
}

fn lines(path: &Path) -> anyhow::Result<usize> {
    Ok(std::fs::read_to_string(path)?.lines().count())
}
