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
fn paths(rest: &str) -> Vec<Vec<String>> {
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
    let deeper = rest[first.len()..].strip_prefix("::").map_or_else(|| vec![Vec::new()], paths);
    let prepend = |path: Vec<String>| [vec![first.to_owned()], path].concat();
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
