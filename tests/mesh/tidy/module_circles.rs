//! No two modules of a crate import each other, directly or through others, and no two folders beside each other do.
//!
//! A module is a file. A folder is a file with all modules below it. Module A imports module B if non-test code of A
//! names an item that B defines, in a `use` declaration or in a path such as `crate::b::Item` or `child::Item`. Names
//! are followed through re-exports to the file that defines them, so a re-export cannot hide a circle, and importing
//! from a folder's root does not count as an import of the root if the root only re-exports the name.
//!
//! A folder's root may declare its children and re-export their names. A re-export counts as an import only if the
//! root uses the name itself. So a root and its child make a circle only if the root uses an item of the child, and
//! the child an item that the root itself defines. Methods are not imported, so a type may have its methods in
//! several files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use e2e::repository;

use super::rust_source::{PathUse, Source};

/// The modules that each module imports.
type Imports = BTreeMap<Vec<String>, BTreeSet<Vec<String>>>;

/// The modules of a crate by their paths. The root is the empty path.
struct Modules {
    sources: BTreeMap<Vec<String>, Source>,
}

impl Modules {
    fn load(src: &Path) -> anyhow::Result<Self> {
        let mut modules = Modules {
            sources: BTreeMap::new(),
        };
        let root = ["lib.rs", "main.rs"].map(|name| src.join(name));
        if let Some(root) = root.iter().find(|path| path.exists()) {
            modules.add(root, src.to_owned(), Vec::new())?;
        }
        Ok(modules)
    }

    /// Adds a file and the modules that it declares, which are in `folder`.
    fn add(&mut self, file: &Path, folder: PathBuf, path: Vec<String>) -> anyhow::Result<()> {
        let text = std::fs::read_to_string(file)?;
        let source = Source::read(&text).with_context(|| file.display().to_string())?;
        for name in &source.declared {
            let file = folder.join(format!("{name}.rs"));
            if file.exists() {
                let path = [path.as_slice(), std::slice::from_ref(name)].concat();
                self.add(&file, folder.join(name), path)?;
            }
        }
        self.sources.insert(path, source);
        Ok(())
    }

    /// The module that defines the target of a path, and the first module on the way there.
    fn resolve(&self, from: &[String], path: &PathUse) -> Option<Vec<String>> {
        let around = [from, &path.inline_modules].concat();
        self.follow(from, around, &path.segments, 16)
    }

    fn follow(
        &self,
        from: &[String],
        around: Vec<String>,
        segments: &[String],
        steps: usize,
    ) -> Option<Vec<String>> {
        let steps = steps.checked_sub(1)?;
        let mut base = around;
        let mut rest = segments;
        match rest.first()?.as_str() {
            "crate" => {
                base.clear();
                rest = &rest[1..];
            }
            "self" => rest = &rest[1..],
            "super" => {
                while rest.first().is_some_and(|segment| segment == "super") {
                    base.pop()?;
                    rest = &rest[1..];
                }
            }
            // A path relative to this file begins with a child module; all others are of other crates or of types.
            child
                if self
                    .sources
                    .contains_key(&[from, &[child.to_owned()]].concat()) =>
            {
                base = from.to_owned();
            }
            _ => return None,
        }
        // Inline modules belong to their file.
        while !self.sources.contains_key(&base) {
            base.pop()?;
        }
        while let Some(segment) = rest.first() {
            let inner = [base.as_slice(), std::slice::from_ref(segment)].concat();
            if !self.sources.contains_key(&inner) {
                break;
            }
            base = inner;
            rest = &rest[1..];
        }
        let Some(name) = rest.first() else {
            return Some(base);
        };
        let source = &self.sources[&base];
        if source.defined.contains(name) {
            return Some(base);
        }
        let declared = source
            .paths
            .iter()
            .find(|path| path.alias.as_ref() == Some(name));
        if let Some(target) = declared {
            return self.follow(
                &base,
                [&base, target.inline_modules.as_slice()].concat(),
                &target.segments,
                steps,
            );
        }
        let globs = source
            .paths
            .iter()
            .filter(|path| path.alias.as_deref() == Some("*"));
        for glob in globs {
            let inside = &glob.segments[..glob.segments.len() - 1];
            let target = [inside, std::slice::from_ref(name)].concat();
            let found = self.follow(&base, base.clone(), &target, steps);
            if let Some(found) = found.filter(|found| self.sources[found].defined.contains(name)) {
                return Some(found);
            }
        }
        Some(base)
    }

    fn imports(&self) -> Imports {
        let mut imports = BTreeMap::new();
        for (module, source) in &self.sources {
            let used = source.paths.iter().filter(|path| {
                let name = path.alias.as_ref();
                !path.is_reexport || name.is_some_and(|name| source.mentioned.contains(name))
            });
            let targets: BTreeSet<Vec<String>> = used
                .filter_map(|path| self.resolve(module, path))
                .filter(|target| target != module)
                .collect();
            imports.insert(module.clone(), targets);
        }
        imports
    }

    /// Sets of files that all import each other, through others or directly.
    fn circles(&self) -> Vec<String> {
        circles(&self.imports(), |file| Some(file.to_vec()))
    }

    /// Sets of folders beside each other that all import each other. A folder is a module with all modules below it.
    fn folder_circles(&self) -> Vec<String> {
        let imports = self.imports();
        let parents = imports.keys().filter_map(|module| module.split_last());
        let parents: BTreeSet<&[String]> = parents.map(|(_, parent)| parent).collect();
        let inside = |parent: &&[String]| {
            circles(&imports, |module| {
                let is_below = module.len() > parent.len() && module.starts_with(parent);
                is_below.then(|| module[..=parent.len()].to_vec())
            })
        };
        parents.iter().flat_map(inside).collect()
    }
}

/// Sets of places that all import each other, each told by the imports of modules between them. Modules without a
/// place are left out.
fn circles(imports: &Imports, place: impl Fn(&[String]) -> Option<Vec<String>>) -> Vec<String> {
    let mut between: Imports = BTreeMap::new();
    for (module, targets) in imports {
        let Some(from) = place(module) else { continue };
        let targets = targets.iter().filter_map(|target| place(target));
        let others: Vec<_> = targets.filter(|target| *target != from).collect();
        between.entry(from).or_default().extend(others);
    }
    let reached = |from: &Vec<String>| {
        let mut seen: BTreeSet<Vec<String>> = BTreeSet::new();
        let mut next = vec![from];
        while let Some(at) = next.pop() {
            for target in between.get(at).into_iter().flatten() {
                if seen.insert(target.clone()) {
                    next.push(target);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&Vec<String>, _> =
        (between.keys()).map(|from| (from, reached(from))).collect();
    let circle_of = |from: &&Vec<String>| -> BTreeSet<Vec<String>> {
        let targets = reached[*from].iter();
        let back = targets.filter(|target| reached[*target].contains(*from));
        back.cloned().collect()
    };
    let all: BTreeSet<_> = reached.keys().map(circle_of).collect();
    let tell = |circle: &BTreeSet<Vec<String>>| {
        let is_inside = |module: &[String]| place(module).is_some_and(|at| circle.contains(&at));
        let edges = imports.iter().filter(|(from, _)| is_inside(from));
        let edges = edges.flat_map(|(from, targets)| {
            let crossing = |to: &&Vec<String>| is_inside(to) && place(to) != place(from);
            let targets = targets.iter().filter(crossing);
            targets.map(|target| format!("{} -> {}", show(from), show(target)))
        });
        edges.collect::<Vec<_>>().join(", ")
    };
    let real = all.iter().filter(|circle| circle.len() > 1);
    real.map(tell).collect()
}

fn show(module: &[String]) -> String {
    match module {
        [] => "lib".to_owned(),
        _ => module.join("/"),
    }
}

fn crates() -> anyhow::Result<Vec<PathBuf>> {
    let mut crates = Vec::new();
    for folder in ["shared", "services"] {
        for entry in std::fs::read_dir(repository().join(folder))? {
            let path = entry?.path();
            if path.join("Cargo.toml").exists() {
                crates.push(Path::new(folder).join(path.file_name().unwrap_or_default()));
            }
        }
    }
    crates.sort();
    Ok(crates)
}

#[test]
fn no_modules_import_each_other_in_a_circle() -> anyhow::Result<()> {
    let crates = crates()?;
    ensure!(
        crates.len() >= 12,
        "only {crates:?} were found: the test is blind"
    );
    let mut wrong = Vec::new();
    let mut files = 0;
    for name in crates {
        let modules = Modules::load(&repository().join(&name).join("src"))?;
        files += modules.sources.len();
        let mut circles = modules.circles();
        circles.extend(modules.folder_circles());
        let name = name.display().to_string();
        for circle in &circles {
            println!("{name}: {circle}");
        }
        if !circles.is_empty() {
            wrong.extend(
                circles
                    .into_iter()
                    .map(|circle| format!("{name}: {circle}")),
            );
        }
    }
    ensure!(
        files > 150,
        "only {files} modules were read: the test is blind"
    );
    ensure!(
        wrong.is_empty(),
        "modules import each other in a circle:\n{}",
        wrong.join("\n")
    );
    Ok(())
}

/// A crate of a few files, as the paths and contents of its modules.
fn crate_of(files: &[(&str, &str)]) -> anyhow::Result<Modules> {
    let path = |name: &str| match name {
        "lib" => Vec::new(),
        name => name.split('/').map(str::to_owned).collect(),
    };
    let sources = files
        .iter()
        .map(|(name, text)| anyhow::Ok((path(name), Source::read(text)?)));
    Ok(Modules {
        sources: sources.collect::<anyhow::Result<_>>()?,
    })
}

#[test]
fn circles_are_found_through_re_exports_and_paths() {
    let lib = "mod a; mod b; pub use a::A; pub use b::B;";
    let circles = |a, b| {
        crate_of(&[("lib", lib), ("a", a), ("b", b)])
            .unwrap()
            .circles()
    };
    let expected = ["a -> b, b -> a"];
    assert_eq!(
        circles(
            "use crate::B; pub struct A(B);",
            "pub struct B; fn f() { crate::a::A::new() }"
        ),
        expected
    );
    assert_eq!(
        circles(
            "use super::{b::{self, B}}; struct A;",
            "use crate::{A}; struct B;"
        ),
        expected
    );
    let none: [&str; 0] = [];
    assert_eq!(
        circles(
            "use crate::B; pub struct A(B);",
            "pub struct B; // crate::A\nconst C: &str = \"crate::A\";"
        ),
        none
    );
    assert_eq!(
        circles(
            "use crate::B; pub struct A(B);",
            "pub struct B; #[cfg(test)] mod tests { use crate::A; }"
        ),
        none
    );
}

#[test]
fn a_root_and_its_child_are_a_circle_only_if_both_use_items_of_each_other() {
    let circles = |root, child| {
        crate_of(&[("lib", "mod root;"), ("root", root), ("root/child", child)])
            .unwrap()
            .circles()
    };
    let expected = ["root -> root/child, root/child -> root"];
    assert_eq!(
        circles(
            "mod child; use child::C; struct R(C);",
            "use super::R; struct C(R);"
        ),
        expected
    );
    assert_eq!(
        circles(
            "mod child; pub use self::child::C; struct R(C);",
            "use super::R; struct C(R);"
        ),
        expected
    );
    assert_eq!(
        circles(
            "mod child; struct R; fn f() { child::g() }",
            "use super::R; fn g() {}"
        ),
        expected
    );
    let none: [&str; 0] = [];
    assert_eq!(
        circles(
            "mod child; pub use child::C; struct R;",
            "use super::R; struct C(R);"
        ),
        none
    );
    assert_eq!(
        circles(
            "mod child; struct R;",
            "use super::R; impl R { fn f(&self) {} }"
        ),
        none
    );
    assert_eq!(
        circles("mod child; use child::C; struct R(C);", "struct C;"),
        none
    );
}

#[test]
fn folders_in_a_circle_are_found_where_their_files_are_in_none() {
    let files = |back| {
        let files = [
            ("lib", "mod a; mod b;"),
            ("a", "mod in_a; mod other; struct A;"),
            ("a/in_a", "use crate::b::B; struct InA(B);"),
            ("a/other", "struct Other;"),
            ("b", "mod in_b; struct B;"),
            ("b/in_b", back),
        ];
        let modules = crate_of(&files).unwrap();
        assert!(modules.circles().is_empty());
        modules.folder_circles()
    };
    let circle = files("use crate::a::other::Other; struct InB(Other);");
    assert_eq!(circle, ["a/in_a -> b, b/in_b -> a/other"]);
    let none: [&str; 0] = [];
    assert_eq!(files("struct InB;"), none);
}
