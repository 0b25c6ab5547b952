//! Artifacts from Rust, without a crate: what include/tvm_deconv/artifact.h does for C, and the same rules (docs/c.md).

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::marker::PhantomData;
use std::mem::transmute;
use std::ptr::{null, null_mut};

extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}

const RTLD_NOW: c_int = 2;
const RTLD_GLOBAL: c_int = 0x100;

/// The structure of DLPack.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// A contiguous array of float32, borrowed while it is used.
pub struct Array<'a> {
    tensor: Tensor,
    of: PhantomData<&'a mut [f32]>,
}

impl<'a> Array<'a> {
    fn of(data: *mut f32, length: usize, shape: &'a [i64]) -> Self {
        assert_eq!(
            shape.iter().product::<i64>(),
            length as i64,
            "the shape must be that of the data"
        );
        let tensor = Tensor {
            data: data.cast(),
            device_type: 1, // CPU
            device_id: 0,
            ndim: shape.len() as i32,
            code: 2, // float
            bits: 32,
            lanes: 1,
            shape: shape.as_ptr(),
            strides: null(),
            byte_offset: 0,
        };
        Array {
            tensor,
            of: PhantomData,
        }
    }

    /// An array that is read.
    pub fn input(data: &'a [f32], shape: &'a [i64]) -> Self {
        Self::of(data.as_ptr().cast_mut(), data.len(), shape)
    }

    /// An array that is written.
    pub fn output(data: &'a mut [f32], shape: &'a [i64]) -> Self {
        Self::of(data.as_mut_ptr(), data.len(), shape)
    }
}

/// TVMFFIAny: a type, and an integer or a pointer.
#[repr(C)]
struct Value {
    kind: i32,
    zero: u32,
    payload: i64,
}

impl Value {
    fn integer(payload: i64) -> Self {
        Value {
            kind: 1,
            zero: 0,
            payload,
        }
    }

    fn array(array: &Array) -> Self {
        Value {
            kind: 7,
            zero: 0,
            payload: &raw const array.tensor as i64,
        }
    }
}

/// TVMFFIObject, 24 bytes, and the first fields of TVMFFIErrorCell: kind and message.
#[repr(C)]
struct Raised {
    header: [u8; 24],
    kind: (*const u8, usize),
    message: (*const u8, usize),
}

type Function = unsafe extern "C" fn(*mut c_void, *const Value, i32, *mut Value) -> c_int;

/// An open artifact, for any number of threads. It stays open until the process ends: its threads may run its code.
pub struct Artifact {
    pack: Function,
    deconv: Function,
    move_error: unsafe extern "C" fn(*mut *mut Raised),
    release: unsafe extern "C" fn(*mut Raised) -> c_int,
}

impl Artifact {
    /// Opens a library by a path with a slash in it.
    ///
    /// # Safety
    /// What it holds is not verified, and runs as you.
    pub unsafe fn open(path: &str) -> Result<Self, String> {
        if symbol(null_mut(), "TVMFFIErrorMoveFromRaised").is_err() {
            library("libtvm_ffi.so", RTLD_NOW | RTLD_GLOBAL)?; // artifacts name no library for it
        }
        let opened = library(path, RTLD_NOW)?;
        symbol(opened, "tvm_deconv_runtime_v5")?; // the version of all that follows
        Ok(Artifact {
            pack: transmute::<*mut c_void, Function>(symbol(opened, "__tvm_ffi_pack")?),
            deconv: transmute::<*mut c_void, Function>(symbol(opened, "__tvm_ffi_deconv_with")?),
            move_error: transmute(symbol(null_mut(), "TVMFFIErrorMoveFromRaised")?),
            release: transmute(symbol(null_mut(), "TVMFFIObjectDecRef")?),
        })
    }

    /// Packs a filter of shape [G, Ci, Co, *K], once, into an array of the manifest's `packed_shape`.
    pub fn pack(&self, filter: &Array, packed: &Array) -> Result<(), String> {
        self.invoke(self.pack, &[Value::array(filter), Value::array(packed)])
    }

    /// Computes `out`, with at most so many threads; 0 are as many as are set. The arrays must not overlap.
    pub fn call(
        &self,
        data: &Array,
        packed: &Array,
        bias: Option<&Array>,
        out: &Array,
        threads: i64,
    ) -> Result<(), String> {
        let mut values = vec![
            Value::integer(threads),
            Value::integer(0),
            Value::integer(0),
        ];
        values.extend(
            [data, packed]
                .into_iter()
                .chain(bias)
                .chain([out])
                .map(Value::array),
        );
        self.invoke(self.deconv, &values)
    }

    fn invoke(&self, function: Function, values: &[Value]) -> Result<(), String> {
        let mut result = Value {
            kind: 0,
            zero: 0,
            payload: 0,
        };
        unsafe {
            if function(
                null_mut(),
                values.as_ptr(),
                values.len() as i32,
                &mut result,
            ) == 0
            {
                return Ok(());
            }
            let mut raised = null_mut();
            (self.move_error)(&mut raised);
            if raised.is_null() {
                return Err("an error that says nothing".into());
            }
            let said = format!("{}: {}", text((*raised).kind), text((*raised).message));
            (self.release)(raised);
            Err(said)
        }
    }
}

unsafe fn text(part: (*const u8, usize)) -> String {
    String::from_utf8_lossy(std::slice::from_raw_parts(part.0, part.1)).into_owned()
}

unsafe fn library(path: &str, flags: c_int) -> Result<*mut c_void, String> {
    let name = CString::new(path).map_err(|error| error.to_string())?;
    let opened = dlopen(name.as_ptr(), flags);
    if opened.is_null() {
        return Err(CStr::from_ptr(dlerror()).to_string_lossy().into_owned());
    }
    Ok(opened)
}

unsafe fn symbol(library: *mut c_void, name: &str) -> Result<*mut c_void, String> {
    let found = dlsym(library, CString::new(name).expect("a name").as_ptr());
    if found.is_null() {
        return Err(format!(
            "no symbol {name}: no artifact for a CPU of this version, compile it again"
        ));
    }
    Ok(found)
}
