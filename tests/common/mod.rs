//! Shared by several tests.

use proptest::test_runner::Config;

/// Returns the configuration of a model test with `cases` random cases, or `PROPTEST_CASES` of them if set.
pub fn model_config(cases: u32) -> Config {
    let from_environment = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    Config { cases: from_environment.unwrap_or(cases), failure_persistence: None, ..Config::default() }
}
