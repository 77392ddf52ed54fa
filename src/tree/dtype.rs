//! The element types: their codes on the wire and in DLPack, and their names in torch and NumPy.

/// An element type; the number is its code on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dtype(u8);

/// The properties of one element type.
struct Row {
    /// Name in `torch`; empty if torch or DLPack has no such type.
    torch: &'static str,
    /// DLPack's code, bits and lanes; the code is 255 if DLPack or torch has no such type.
    dl: (u8, u8, u16),
    itemsize: u8,
    /// Alignment of an element in bytes.
    align: u8,
    /// NumPy's type string without byte order; empty if NumPy has no such type.
    numpy: &'static str,
}

const fn row(torch: &'static str, dl: (u8, u8, u16), itemsize: u8, align: u8, numpy: &'static str) -> Row {
    Row { torch, dl, itemsize, align, numpy }
}

/// The order is part of the wire format: append only.
static ROWS: [Row; 24] = [
    row("bool", (6, 8, 1), 1, 1, "?"),
    row("uint8", (1, 8, 1), 1, 1, "u1"),
    row("int8", (0, 8, 1), 1, 1, "i1"),
    row("uint16", (1, 16, 1), 2, 2, "u2"),
    row("int16", (0, 16, 1), 2, 2, "i2"),
    row("uint32", (1, 32, 1), 4, 4, "u4"),
    row("int32", (0, 32, 1), 4, 4, "i4"),
    row("uint64", (1, 64, 1), 8, 8, "u8"),
    row("int64", (0, 64, 1), 8, 8, "i8"),
    row("float16", (2, 16, 1), 2, 2, "f2"),
    row("bfloat16", (4, 16, 1), 2, 2, ""),
    row("float32", (2, 32, 1), 4, 4, "f4"),
    row("float64", (2, 64, 1), 8, 8, "f8"),
    row("", (255, 128, 1), 16, 16, "f16"),
    row("complex32", (5, 32, 1), 4, 2, ""),
    row("complex64", (5, 64, 1), 8, 4, "c8"),
    row("complex128", (5, 128, 1), 16, 8, "c16"),
    row("", (255, 0, 1), 32, 16, "c32"),
    row("float8_e4m3fn", (10, 8, 1), 1, 1, ""),
    row("float8_e4m3fnuz", (11, 8, 1), 1, 1, ""),
    row("float8_e5m2", (12, 8, 1), 1, 1, ""),
    row("float8_e5m2fnuz", (13, 8, 1), 1, 1, ""),
    row("float8_e8m0fnu", (14, 8, 1), 1, 1, ""),
    row("float4_e2m1fn_x2", (17, 4, 2), 1, 1, ""),
];

impl Dtype {
    /// `torch.uint8`.
    pub const UINT8: Self = Self(1);
    /// `torch.int8`.
    pub const INT8: Self = Self(2);
    /// `torch.int64`.
    pub const INT64: Self = Self(8);
    /// `torch.float64`.
    pub const FLOAT64: Self = Self(12);

    /// Returns every element type.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..ROWS.len() as u8).map(Self)
    }

    fn row(self) -> &'static Row {
        &ROWS[usize::from(self.0)]
    }

    /// Returns the code on the wire.
    #[inline]
    pub fn code(self) -> u8 {
        self.0
    }

    /// Returns the element type of a code on the wire; `None` if there is no such code.
    #[inline]
    pub fn from_code(code: u8) -> Option<Self> {
        (usize::from(code) < ROWS.len()).then_some(Self(code))
    }

    /// Returns the number of bytes of one element.
    #[inline]
    pub fn itemsize(self) -> usize {
        usize::from(self.row().itemsize)
    }

    /// Returns the alignment of an element in bytes (for a complex number, that of its parts).
    #[inline]
    pub fn align(self) -> usize {
        usize::from(self.row().align)
    }

    /// Returns DLPack's (code, bits, lanes); `None` for the types that only NumPy has.
    #[inline]
    pub fn dl(self) -> Option<(u8, u8, u16)> {
        let dl = self.row().dl;
        (dl.0 != 255).then_some(dl)
    }

    /// Returns the element type of DLPack's (code, bits, lanes). torch exports `int1` to `int7`, `uint1` to `uint7` and
    /// `bit` as 8-bit integers, so callers must also check a tensor's dtype.
    #[inline]
    pub fn from_dl(code: u8, bits: u8, lanes: u16) -> Option<Self> {
        if code == 255 {
            return None;
        }
        ROWS.iter().position(|row| row.dl == (code, bits, lanes)).map(|at| Self(at as u8))
    }

    /// Returns the name in `torch`; `None` if torch or DLPack has no such type.
    pub fn torch_name(self) -> Option<&'static str> {
        let name = self.row().torch;
        (!name.is_empty()).then_some(name)
    }

    /// Returns NumPy's type string, in native byte order; `None` if NumPy has no such type.
    pub fn numpy_name(self) -> Option<&'static str> {
        let name = self.row().numpy;
        (!name.is_empty()).then_some(name)
    }

    /// Returns true if a torch tensor of this type may have its negative bit set, as the imaginary part of a conjugate
    /// does.
    #[inline]
    pub fn may_be_neg(self) -> bool {
        matches!(self.0, 9..=17)
    }

    /// Returns true if the elements are complex numbers.
    #[inline]
    pub fn is_complex(self) -> bool {
        matches!(self.0, 14..=17)
    }
}

#[cfg(test)]
mod tests {
    use super::Dtype;

    #[test]
    fn codes_and_dlpack_types_round_trip() {
        for dtype in Dtype::all() {
            assert_eq!(Dtype::from_code(dtype.code()), Some(dtype));
            if let Some((code, bits, lanes)) = dtype.dl() {
                assert_eq!(Dtype::from_dl(code, bits, lanes), Some(dtype));
                assert_eq!(usize::from(bits) * usize::from(lanes), dtype.itemsize() * 8);
            }
            assert_eq!(dtype.itemsize() % dtype.align(), 0);
            assert_eq!(dtype.dl().is_some(), dtype.torch_name().is_some());
        }
        assert_eq!(Dtype::from_code(Dtype::all().count() as u8), None);
        assert_eq!(Dtype::from_dl(255, 0, 1), None);
    }

    #[test]
    fn constants_have_the_types_of_their_names() {
        for (dtype, name) in
            [(Dtype::UINT8, "uint8"), (Dtype::INT8, "int8"), (Dtype::INT64, "int64"), (Dtype::FLOAT64, "float64")]
        {
            assert_eq!(dtype.torch_name(), Some(name));
        }
        assert!(Dtype::all().filter(|d| d.is_complex()).all(|d| d.may_be_neg()));
    }
}
