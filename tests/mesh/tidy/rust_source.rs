//! The import paths of a Rust source, read by `syn`: what the file declares, what it defines, and what it names.

use std::collections::BTreeSet;

use anyhow::Context as _;
use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, ItemMod, ItemUse, Meta, Path, Stmt, UseTree, Visibility};

/// A path that a module mentions, such as `crate::a::B` or `super::c`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PathUse {
    /// The segments of the path. A glob ends with `*`.
    pub(super) segments: Vec<String>,
    /// The name under which a `use` declaration makes the target known; `None` for a path within code.
    pub(super) alias: Option<String>,
    /// Whether it is a `pub use`, with or without a restriction.
    pub(super) is_reexport: bool,
    /// The inline modules of the file around the path.
    pub(super) inline_modules: Vec<String>,
}

/// The parts of a source file that matter for imports. Test code is left out.
#[derive(Debug, Default)]
pub(super) struct Source {
    /// Modules in files of their own that the file declares.
    pub(super) declared: BTreeSet<String>,
    /// Names of the items that the file defines.
    pub(super) defined: BTreeSet<String>,
    /// Paths in `use` declarations and in code.
    pub(super) paths: Vec<PathUse>,
    /// First segments of the paths outside of `use` declarations.
    pub(super) mentioned: BTreeSet<String>,
}

impl Source {
    /// Reads a file.
    ///
    /// # Errors
    /// The text is no Rust.
    pub(super) fn read(text: &str) -> anyhow::Result<Self> {
        let mut reader = Reader::default();
        reader.visit_file(&syn::parse_file(text).context("syn cannot read it")?);
        Ok(reader.source)
    }
}

#[derive(Default)]
struct Reader {
    source: Source,
    inline_modules: Vec<String>,
}

impl Reader {
    fn add(&mut self, segments: Vec<String>, alias: Option<String>, is_reexport: bool) {
        self.source.paths.push(PathUse {
            segments,
            alias,
            is_reexport,
            inline_modules: self.inline_modules.clone(),
        });
    }

    /// A path in code.
    fn mention(&mut self, segments: Vec<String>) {
        if let Some(first) = segments.first() {
            self.source.mentioned.insert(first.clone());
        }
        if segments.len() > 1 {
            self.add(segments, None, false);
        }
    }

    fn use_tree(&mut self, tree: &UseTree, before: &[String], is_reexport: bool) {
        let with = |name: String| match name.as_str() {
            "self" if !before.is_empty() => before.to_vec(),
            _ => [before, &[name]].concat(),
        };
        let (segments, alias) = match tree {
            UseTree::Path(path) => {
                let inner = with(path.ident.to_string());
                return self.use_tree(&path.tree, &inner, is_reexport);
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.use_tree(tree, before, is_reexport);
                }
                return;
            }
            UseTree::Name(name) => (with(name.ident.to_string()), None),
            UseTree::Rename(renamed) => (
                with(renamed.ident.to_string()),
                Some(renamed.rename.to_string()),
            ),
            UseTree::Glob(_) => (with("*".to_owned()), None),
        };
        let alias = alias.or_else(|| segments.last().cloned());
        self.add(segments, alias, is_reexport);
    }

    /// The paths among the tokens of a macro's call, whose grammar is the macro's own.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        // Colons since the last identifier.
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Punct(mark) if mark.as_char() == ':' => colons += 1,
                TokenTree::Ident(name) if colons == 2 && !path.is_empty() => {
                    path.push(name.to_string());
                    colons = 0;
                }
                other => {
                    self.mention(std::mem::take(&mut path));
                    colons = 0;
                    match other {
                        TokenTree::Ident(name) => path.push(name.to_string()),
                        TokenTree::Group(group) => self.tokens(group.stream()),
                        TokenTree::Punct(_) | TokenTree::Literal(_) => {}
                    }
                }
            }
        }
        self.mention(path);
    }
}

/// Whether an attribute leaves its item out of all builds but those of tests.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string();
            // `any(test, feature = "...")` is for other builds as well.
            condition == "test" || condition.starts_with("all (") && condition.contains("test")
        }
        _ => false,
    })
}

/// The attributes and the name of an item that others can import.
fn described(item: &Item) -> (&[Attribute], Option<&syn::Ident>) {
    match item {
        Item::Const(item) => (&item.attrs, Some(&item.ident)),
        Item::Enum(item) => (&item.attrs, Some(&item.ident)),
        Item::Fn(item) => (&item.attrs, Some(&item.sig.ident)),
        Item::Static(item) => (&item.attrs, Some(&item.ident)),
        Item::Struct(item) => (&item.attrs, Some(&item.ident)),
        Item::Trait(item) => (&item.attrs, Some(&item.ident)),
        Item::Type(item) => (&item.attrs, Some(&item.ident)),
        Item::Union(item) => (&item.attrs, Some(&item.ident)),
        Item::Macro(item) => (&item.attrs, item.ident.as_ref()),
        Item::Mod(item) => (&item.attrs, None),
        Item::Impl(item) => (&item.attrs, None),
        Item::Use(item) => (&item.attrs, None),
        _ => (&[], None),
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast Item) {
        let (attributes, name) = described(item);
        if is_for_tests(attributes) {
            return;
        }
        self.source.defined.extend(name.map(ToString::to_string));
        // The `super` in the rules of a macro depends on the place of the call.
        if !matches!(item, Item::Macro(rules) if rules.ident.is_some()) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes = match item {
            ImplItem::Fn(item) => item.attrs.as_slice(),
            ImplItem::Const(item) => &item.attrs,
            _ => &[],
        };
        if !is_for_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_stmt(&mut self, statement: &'ast Stmt) {
        if !matches!(statement, Stmt::Local(local) if is_for_tests(&local.attrs)) {
            visit::visit_stmt(self, statement);
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !is_for_tests(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_field_value(&mut self, field: &'ast syn::FieldValue) {
        if !is_for_tests(&field.attrs) {
            visit::visit_field_value(self, field);
        }
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        if !is_for_tests(&variant.attrs) {
            visit::visit_variant(self, variant);
        }
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if !is_for_tests(&arm.attrs) {
            visit::visit_arm(self, arm);
        }
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        let name = module.ident.to_string();
        if module.content.is_none() {
            self.source.declared.insert(name);
        } else {
            self.inline_modules.push(name);
            visit::visit_item_mod(self, module);
            self.inline_modules.pop();
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let is_reexport = !matches!(item.vis, Visibility::Inherited);
        self.use_tree(&item.tree, &[], is_reexport);
    }

    fn visit_path(&mut self, path: &'ast Path) {
        let names = path.segments.iter().map(|part| part.ident.to_string());
        self.mention(names.collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        self.tokens(call.tokens.clone());
    }

    /// The path of a visibility imports nothing.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    /// The paths of attributes are those of other crates.
    fn visit_attribute(&mut self, _: &'ast Attribute) {}
}
