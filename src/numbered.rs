//! Enums whose values are stored in shared memory as numbers.

/// Defines an enum with explicit numbers, and `of_number`, which converts a number to a value. If the variants have
/// names for reports and statistics, also defines `name`, which returns a value's name.
macro_rules! numbered_enum {
    ($(#[$meta:meta])* pub enum $enum:ident { $($(#[$doc:meta])* $variant:ident = $number:literal,)* }) => {
        $(#[$meta])*
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $enum { $($(#[$doc])* $variant = $number,)* }

        impl $enum {
            /// Returns the value with this number, or `None`.
            #[inline]
            pub const fn of_number(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
    ($(#[$meta:meta])* pub enum $enum:ident {
        $($(#[$doc:meta])* $variant:ident = $number:literal => $name:literal,)*
    }) => {
        numbered_enum! { $(#[$meta])* pub enum $enum { $($(#[$doc])* $variant = $number,)* } }

        impl $enum {
            /// Returns the name that reports use.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

pub(crate) use numbered_enum;

#[cfg(test)]
mod tests {
    numbered_enum! {
        /// Two values.
        pub enum Pair {
            /// The first.
            First = 1 => "first",
            /// The second.
            Second = 7 => "second",
        }
    }

    #[test]
    fn a_value_comes_back_from_its_number() {
        for (number, value, name) in [(1, Pair::First, "first"), (7, Pair::Second, "second")] {
            assert_eq!((value as u32, value.name()), (number, name));
            assert_eq!(Pair::of_number(number), Some(value));
        }
        assert_eq!([0, 2, 8, u32::MAX].map(Pair::of_number), [None; 4]);
    }
}
