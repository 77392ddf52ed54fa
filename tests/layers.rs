//! The layers of the crate: a module uses only modules of lower layers. The table is in the documentation of
//! `src/lib.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Modules that may use PyO3.
const PYO3: &[&str] = &["codec", "interop", "python"];

/// The layer of each module; 0 is the highest.
type Layers = BTreeMap<String, usize>;

/// Reads the table of `lib.rs`. Each line is a layer: its modules, two spaces, and a description.
fn table(lib: &str) -> Layers {
    let lines = lib.lines().skip_while(|line| *line != "//! ```text").skip(1);
    let lines = lines.take_while(|line| *line != "//! ```").filter_map(|line| line.strip_prefix("//! "));
    let mut layers = Layers::new();
    for (layer, line) in lines.enumerate() {
        for module in line.split("  ").next().unwrap().split(", ") {
            assert!(layers.insert(module.into(), layer).is_none(), "{module} is in two layers");
        }
    }
    layers
}

/// The module of a file, as names from the crate's root.
type Module = Vec<String>;

/// A use of a module: the line number, from 1, and the module.
type Used = (usize, String);

/// Returns the code of a file without comments. Lines keep their numbers.
fn code(text: &str) -> String {
    let code = |line: &str| line.split("//").next().unwrap_or("").to_owned() + "\n";
    text.lines().map(code).collect()
}

fn name(text: &str) -> &str {
    &text[..text.find(|c: char| c != '_' && !c.is_ascii_alphanumeric()).unwrap_or(text.len())]
}

/// Returns the paths after a prefix such as `super::`, one for each branch between braces.
fn paths(rest: &str) -> Vec<Module> {
    if let Some(inside) = rest.strip_prefix('{') {
        let (mut depth, mut begin, mut all) = (0, 0, Vec::new());
        for (at, c) in inside.char_indices() {
            match c {
                '{' => depth += 1,
                ',' | '}' if depth == 0 => {
                    // Nothing follows a trailing comma.
                    let branch = Some(inside[begin..at].trim()).filter(|branch| !branch.is_empty());
                    all.extend(branch.into_iter().flat_map(paths));
                    begin = at + 1;
                    if c == '}' {
                        break;
                    }
                }
                '}' => depth -= 1,
                _ => {}
            }
        }
        return all;
    }
    let first = name(rest);
    let deeper = rest[first.len()..].strip_prefix("::").map_or_else(|| vec![Module::new()], paths);
    let prepend = |path: Module| [vec![first.to_owned()], path].concat();
    deeper.into_iter().map(prepend).collect()
}

/// Returns the uses of modules in the crate's root, by `crate::` or by `super::` repeated `depth` times. `depth` is the
/// number of modules around the file's code.
fn used(text: &str, depth: usize) -> Vec<Used> {
    let text = code(text);
    let root = "super::".repeat(depth);
    let mut uses = Vec::new();
    for prefix in ["crate::", &root] {
        for (at, _) in text.match_indices(prefix) {
            let starts = !text[..at].ends_with(|c: char| c == ':' || c == '_' || c.is_ascii_alphanumeric());
            let line = text[..at].matches('\n').count() + 1;
            if starts {
                uses.extend(paths(&text[at + prefix.len()..]).into_iter().map(|path| (line, path[0].clone())));
            }
        }
    }
    uses
}

/// Describes the violations in one file of a module, a line each.
fn violations(layers: &Layers, module: &str, file: &Path, text: &str, depth: usize) -> String {
    let (mut wrong, own) = (String::new(), layers[module]);
    for (line, other) in used(text, depth) {
        let Some(&layer) = layers.get(&other) else { continue };
        if other != module && layer <= own {
            let allowed: Vec<&str> =
                layers.iter().filter(|(_, layer)| **layer > own).map(|(name, _)| &**name).collect();
            let file = file.display();
            writeln!(wrong, "{file}:{line}: `{module}` uses `{other}`, but may use only {}", allowed.join(", "))
                .unwrap();
        }
    }
    for (at, line) in code(text).lines().enumerate() {
        if !PYO3.contains(&module) && line.contains("pyo3") {
            let (file, allowed) = (file.display(), PYO3.join(", "));
            writeln!(wrong, "{file}:{}: `{module}` uses `pyo3`, which only {allowed} may", at + 1).unwrap();
        }
    }
    wrong
}

/// Returns every source file under a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let all = entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] });
    all.filter(|path| path.extension().is_some_and(|end| end == "rs")).collect()
}

/// Returns the path of modules around a file's code.
fn modules_of(file: &Path) -> Vec<String> {
    let mut parts: Vec<String> = file.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
    let last = parts.pop().unwrap();
    if last != "mod.rs" {
        parts.push(last.strip_suffix(".rs").unwrap().to_owned());
    }
    parts
}

#[test]
fn modules_use_only_lower_layers() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let lib = std::fs::read_to_string(src.join("lib.rs")).unwrap();
    let layers = table(&lib);
    let declared = |line: &str| {
        let name = line.trim_start_matches("pub ").strip_prefix("mod ")?.strip_suffix(';')?;
        Some(name.to_owned())
    };
    let modules: BTreeSet<String> = lib.lines().filter_map(declared).collect();
    assert_eq!(layers.keys().cloned().collect::<BTreeSet<_>>(), modules, "the table names every module once");
    let (mut wrong, mut count) = (String::new(), 0);
    for path in files(&src) {
        let file = path.strip_prefix(&src).unwrap();
        let modules = modules_of(file);
        if file != Path::new("lib.rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            count += used(&text, modules.len()).len();
            wrong += &violations(&layers, &modules[0], &Path::new("src").join(file), &text, modules.len());
        }
    }
    assert!(count > 200, "only {count} uses are found");
    assert!(wrong.is_empty(), "the layers of src/lib.rs are broken:\n{wrong}");
}

#[test]
fn uses_of_higher_layers_are_found() {
    let layers = table("//! ```text\n//! top  words\n//! left, right  words\n//! base  words\n//! ```\n");
    assert_eq!(layers["left"], layers["right"]);
    let check = |text: &str, depth| violations(&layers, "left", Path::new("src/left.rs"), text, depth);
    for fine in [
        "use crate::base::{self, top};\nuse crate::left::x;",
        "// crate::top\nlet x = crate::base::right();",
        "use other_crate::top;\npub(crate) fn top() {}",
        "use super::top;",
    ] {
        assert_eq!(check(fine, 2), "", "{fine}");
    }
    for (text, line, other) in [
        ("use crate::top::x;", 1, "top"),
        ("\nlet x = crate::right::f();", 2, "right"),
        ("use crate::{\n    base::{a, b},\n    top,\n};", 1, "top"),
        ("use super::super::top;", 1, "top"),
    ] {
        let want = format!("src/left.rs:{line}: `left` uses `{other}`, but may use only base\n");
        assert_eq!(check(text, 2), want, "{text}");
    }
    assert!(check("use pyo3::prelude::*;", 1).contains("src/left.rs:1: `left` uses `pyo3`"));
}

/// Modules whose files still form cycles: children use what their `mod.rs` defines.
const CYCLES: &[&str] = &["codec", "scheduler", "shm", "store", "sys", "tree"];

/// A module, and those that it uses or declares.
type Arrows = BTreeMap<Module, BTreeSet<Module>>;

/// Adds the `modules` that the file of `module` uses or declares. Tests do not count.
fn add_arrows(arrows: &mut Arrows, modules: &BTreeSet<Module>, module: &Module, text: &str) {
    let text = code(text);
    let mut own = BTreeSet::new();
    // Modules within the file, with the indentation of their ends.
    let mut inner: Vec<(usize, String)> = Vec::new();
    let mut used = |from: Module, path: &Module| {
        let full = [from, path.iter().filter(|name| *name != "self").cloned().collect()].concat();
        let to = (1..=full.len()).rev().map(|len| full[..len].to_vec()).find(|to| modules.contains(to));
        own.extend(to.filter(|to| to[0] == module[0] && to != module));
    };
    for (at, line) in text.split_inclusive('\n').scan(0, |at, line| {
        *at += line.len();
        Some((*at - line.len(), line))
    }) {
        let indent = line.len() - line.trim_start().len();
        if inner.last().is_some_and(|(end, _)| *end == indent) && line.trim_start().starts_with('}') {
            inner.pop();
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        if let Some([.., "mod", child]) = words.strip_suffix(&["{"]) {
            inner.push((indent, child.to_string()));
        } else if let [.., "mod", child] = words[..]
            && let Some(child) = child.strip_suffix(';')
        {
            used(module.clone(), &vec![child.to_owned()]);
        }
        if inner.iter().any(|(_, name)| name == "tests") {
            continue;
        }
        let here = [module.clone(), inner.iter().map(|(_, name)| name.clone()).collect()].concat();
        for (start, _) in line.match_indices(['s', 'c']) {
            let before = &line[..start];
            if before.ends_with(|c: char| c == ':' || c == '_' || c.is_ascii_alphanumeric())
                || before.ends_with("pub(in ")
            {
                continue;
            }
            let mut rest = &text[at + start..];
            let mut from = here.clone();
            if let Some(after) = rest.strip_prefix("crate::") {
                (from, rest) = (Module::new(), after);
            } else if rest.starts_with("super::") {
                while let Some(after) = rest.strip_prefix("super::") {
                    from.pop();
                    rest = after;
                }
            } else {
                continue;
            }
            paths(rest).iter().for_each(|path| used(from.clone(), path));
        }
    }
    own.retain(|module| module.last().is_none_or(|name| name != "tests"));
    arrows.insert(module.clone(), own);
}

/// Returns a cycle of arrows, if there is one.
fn cycle(arrows: &Arrows) -> Option<Vec<Module>> {
    fn follow(arrows: &Arrows, done: &mut BTreeSet<Module>, way: &mut Vec<Module>) -> bool {
        let last = way.last().unwrap().clone();
        for next in arrows.get(&last).into_iter().flatten() {
            if let Some(at) = way.iter().position(|module| module == next) {
                way.drain(..at);
                return true;
            }
            if !done.contains(next) {
                way.push(next.clone());
                if follow(arrows, done, way) {
                    return true;
                }
                way.pop();
            }
        }
        done.insert(last);
        false
    }
    let mut done = BTreeSet::new();
    arrows.keys().find_map(|first| {
        let mut way = vec![first.clone()];
        follow(arrows, &mut done, &mut way).then_some(way)
    })
}

/// Names the files of a cycle, in the order of their arrows.
fn named(cycle: &[Module]) -> String {
    cycle.iter().map(|module| module.join("::")).collect::<Vec<_>>().join(" -> ")
}

#[test]
fn the_files_of_a_module_use_each_other_in_one_direction() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files = files(&src);
    let sources: BTreeMap<Module, &PathBuf> =
        files.iter().map(|path| (modules_of(path.strip_prefix(&src).unwrap()), path)).collect();
    let modules: BTreeSet<Module> = sources.keys().cloned().collect();
    let mut by_top: BTreeMap<String, Arrows> = BTreeMap::new();
    for (module, path) in sources {
        if module != ["lib"] && module.last().is_none_or(|name| name != "tests") && !module.contains(&"tests".into()) {
            let text = std::fs::read_to_string(path).unwrap();
            add_arrows(by_top.entry(module[0].clone()).or_default(), &modules, &module, &text);
        }
    }
    for (top, arrows) in &by_top {
        let found = cycle(arrows).map(|cycle| named(&cycle));
        match CYCLES.contains(&&**top) {
            true => assert!(found.is_some(), "`{top}` has no cycle any more: remove it from CYCLES"),
            false => assert_eq!(found, None, "move what both need into a file of its own"),
        }
    }
    let engine: usize = by_top["engine"].values().map(BTreeSet::len).sum();
    assert!(engine > 60, "only {engine} arrows are found in `engine`");
}

#[test]
fn a_cycle_of_files_is_found() {
    let modules: BTreeSet<Module> = [&["a"][..], &["a", "x"], &["a", "y"], &["a", "y", "z"], &["b"]]
        .map(|module| module.iter().map(|name| name.to_string()).collect())
        .into();
    let check = |sources: &[(&[&str], &str)]| {
        let mut arrows = Arrows::new();
        for (module, text) in sources {
            let module = module.iter().map(|name| name.to_string()).collect();
            add_arrows(&mut arrows, &modules, &module, text);
        }
        cycle(&arrows).map(|cycle| named(&cycle))
    };
    let root: (&[&str], &str) = (&["a"], "mod x;\npub mod y;\npub use x::X;\n");
    for (x, y, want) in [
        ("use super::y::Y;", "pub struct Y;", None),
        ("use super::y::Y;", "// use super::x::X;\nuse crate::b::x;", None),
        ("use super::y::Y;", "#[cfg(test)]\nmod tests {\n    use crate::a::X;\n}\n", None),
        ("use super::X;", "", Some("a -> a::x")),
        ("fn f() -> crate::a::X;", "", Some("a -> a::x")),
        ("use super::y::Y;", "use super::x::X;", Some("a::x -> a::y")),
        ("use super::{\n    y::{self, Y},\n};", "use crate::{a::{x::X}, b};", Some("a::x -> a::y")),
        ("mod inner {\n    use super::super::y;\n}", "fn f(x: super::x::X);", Some("a::x -> a::y")),
    ] {
        assert_eq!(check(&[root, (&["a", "x"], x), (&["a", "y"], y)]).as_deref(), want, "{x} {y}");
    }
    let child: (&[&str], &str) = (&["a", "y", "z"], "use super::Y;");
    assert_eq!(check(&[(&["a", "y"], "mod z;"), child]).as_deref(), Some("a::y -> a::y::z"));
}

#[test]
fn a_module_with_a_folder_is_its_mod_rs() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let misplaced: Vec<PathBuf> = files(&src).into_iter().filter(|file| file.with_extension("").is_dir()).collect();
    assert!(misplaced.is_empty(), "move each of these into its folder, as mod.rs: {misplaced:?}");
}
