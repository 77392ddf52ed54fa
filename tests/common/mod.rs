//! What several tests share.

use proptest::test_runner::Config;

/// The configuration of a model test: `cases` random cases, or as many as `PROPTEST_CASES` says.
pub fn model_config(cases: u32) -> Config {
    let wanted = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    Config { cases: wanted.unwrap_or(cases), failure_persistence: None, ..Config::default() }
}
