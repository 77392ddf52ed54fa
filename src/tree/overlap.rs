//! Detection of views whose extents overlap, and of views whose elements share a byte.

/// The layout of a strided view in memory. Its strides must not be negative.
#[derive(Clone, Copy, Debug)]
pub struct Lattice<'a> {
    /// The address of the first element.
    pub(crate) start: usize,
    /// Number of bytes from the first to the last element, inclusive.
    pub(crate) extent: usize,
    pub(crate) shape: &'a [i64],
    /// The strides, in elements.
    pub(crate) strides: &'a [i64],
    pub(crate) itemsize: usize,
}

/// Splits `extents`, which must be sorted by start, into runs in which each extent after the first overlaps an earlier
/// one, and calls `each` with every run. `bounds` returns the start and the end of an extent.
pub fn components<'a, T>(extents: &'a [T], bounds: impl Fn(&T) -> (usize, usize), mut each: impl FnMut(&'a [T])) {
    let mut rest = extents;
    while let Some(first) = rest.first() {
        let mut end = bounds(first).1;
        let mut len = 1;
        while let Some((next_start, next_end)) = rest.get(len).map(&bounds)
            && next_start < end
        {
            end = end.max(next_end);
            len += 1;
        }
        let (component, after) = rest.split_at(len);
        each(component);
        rest = after;
    }
}

/// Returns true if any two views share a byte of an element, or if finding out takes more than `budget` steps. `views`
/// must be sorted by start.
pub fn any_shared(views: &[Lattice<'_>], mut budget: u32) -> bool {
    for (at, first) in views.iter().enumerate() {
        let end = first.start.saturating_add(first.extent);
        for second in views[at + 1..].iter().take_while(|second| second.start < end) {
            if shares(first, second, &mut budget) {
                return true;
            }
        }
    }
    false
}

/// One dimension of the difference between the addresses of two views' elements: its stride in bytes, and the range of
/// its coefficient.
#[derive(Clone, Copy)]
struct Dimension {
    stride: i128,
    low: i128,
    high: i128,
    /// The range of the sum over the dimensions after this one.
    later: (i128, i128),
}

/// Returns true if an element of `first` and one of `second` share a byte.
///
/// The distance between the addresses of two elements is the distance between the views' starts plus a sum of
/// coefficients times strides, with one term per dimension of either view. The search looks for a distance that is
/// smaller than an element, and tries the widest stride first. If the strides are nested, as they usually are, only a
/// few coefficients per dimension can lead to such a distance.
fn shares(first: &Lattice<'_>, second: &Lattice<'_>, budget: &mut u32) -> bool {
    let mut dimensions: Vec<Dimension> = Vec::new();
    for (view, sign) in [(first, 1), (second, -1)] {
        for (&size, &stride) in view.shape.iter().zip(view.strides).filter(|&(&size, &s)| size > 1 && s > 0) {
            let stride = i128::from(stride) * view.itemsize as i128;
            let far = sign * i128::from(size - 1);
            let (low, high) = (far.min(0), far.max(0));
            match dimensions.iter_mut().find(|dimension| dimension.stride == stride) {
                Some(dimension) => {
                    (dimension.low, dimension.high) = (dimension.low + low, dimension.high + high);
                }
                None => dimensions.push(Dimension { stride, low, high, later: (0, 0) }),
            }
        }
    }
    dimensions.sort_unstable_by_key(|dimension| std::cmp::Reverse(dimension.stride));
    let mut later = (0, 0);
    for dimension in dimensions.iter_mut().rev() {
        dimension.later = later;
        later = (later.0 + dimension.low * dimension.stride, later.1 + dimension.high * dimension.stride);
    }
    let near = (1 - first.itemsize as i128, second.itemsize as i128 - 1);
    search(&dimensions, first.start as i128 - second.start as i128, near, budget)
}

fn search(dimensions: &[Dimension], at: i128, near: (i128, i128), budget: &mut u32) -> bool {
    let Some(left) = budget.checked_sub(1) else { return true };
    *budget = left;
    let Some((dimension, rest)) = dimensions.split_first() else { return (near.0..=near.1).contains(&at) };
    let Dimension { stride, low, high, later } = *dimension;
    let low = low.max(-(at + later.1 - near.0).div_euclid(stride));
    let high = high.min((near.1 - at - later.0).div_euclid(stride));
    (low..=high).any(|coefficient| search(rest, at + coefficient * stride, near, budget))
}

#[cfg(test)]
mod tests {
    use super::{Lattice, any_shared, components};
    use crate::tree::layout::extent;
    use proptest::prelude::*;

    fn lattice<'a>(start: usize, shape: &'a [i64], strides: &'a [i64], itemsize: usize) -> Lattice<'a> {
        let extent = extent(shape, strides, itemsize).unwrap();
        Lattice { start, extent, shape, strides, itemsize }
    }

    /// Returns the addresses of the bytes of a view's elements.
    fn bytes(view: &Lattice<'_>) -> std::collections::HashSet<usize> {
        let mut all = vec![view.start];
        for (&size, &stride) in view.shape.iter().zip(view.strides) {
            let step = stride as usize * view.itemsize;
            all = all.iter().flat_map(|&at| (0..size as usize).map(move |i| at + i * step)).collect();
        }
        all.iter().flat_map(|&at| at..at + view.itemsize).collect()
    }

    #[test]
    fn extents_are_grouped() {
        let mut lengths = Vec::new();
        let extents = [(0, 4), (4, 8), (6, 7), (7, 9), (9, 9), (20, 30), (21, 22), (29, 31)];
        components(&extents, |&extent| extent, |component| lengths.push(component.len()));
        assert_eq!(lengths, [1, 3, 1, 3]);
    }

    #[test]
    fn columns_and_grids_share_nothing() {
        let shares = |views: &[Lattice<'_>]| any_shared(views, 1 << 12);
        let column = |at| lattice(at, &[1000], &[100], 4);
        assert!(!shares(&[column(0), column(4), column(8)]));
        assert!(shares(&[column(0), column(4), column(400)]));
        assert!(shares(&[column(0), column(2)]), "half an element");
        let grid = |at| lattice(at, &[500, 50], &[200, 2], 8);
        assert!(!shares(&[grid(0), grid(8), grid(808)]));
        assert!(shares(&[lattice(0, &[1000], &[100], 8), lattice(2400, &[100], &[1], 8)]), "row and column");
        assert!(!shares(&[lattice(0, &[1000], &[100], 8), lattice(2408, &[99], &[1], 8)]), "the remainder of the row");
        assert!(any_shared(&[column(0), column(4), column(8)], 2), "too many steps to decide");
    }

    proptest! {
        #[test]
        fn two_views_share_an_element_if_their_bytes_overlap(
            a in (0usize..60, proptest::collection::vec((1i64..5, 0i64..9), 0..4), 0u32..3),
            b in (0usize..60, proptest::collection::vec((1i64..5, 0i64..9), 0..4), 0u32..3),
        ) {
            let split = |dims: &[(i64, i64)]| -> (Vec<i64>, Vec<i64>) { dims.iter().copied().unzip() };
            let (a_dims, b_dims) = (split(&a.1), split(&b.1));
            let first = lattice(a.0, &a_dims.0, &a_dims.1, 1 << a.2);
            let second = lattice(b.0, &b_dims.0, &b_dims.1, 1 << b.2);
            let mut views = [first, second];
            views.sort_by_key(|view| view.start);
            let expected = !bytes(&first).is_disjoint(&bytes(&second));
            prop_assert_eq!(any_shared(&views, 1 << 20), expected);
        }
    }
}
