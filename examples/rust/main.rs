//! A layer from Rust: the program of examples/cpp/plain.c. Compile it, and the problem, by
//!
//!     tvm-deconv compile examples/cpp/problem.json --output artifacts
//!     cargo build --manifest-path examples/rust/Cargo.toml
//!     LD_LIBRARY_PATH=$(tvm-ffi-config --libdir) examples/rust/target/debug/deconv artifacts/LIBRARY.so PACKED_ELEMENTS

mod artifact;

use artifact::{Array, Artifact};

const DATA: [i64; 4] = [1, 4, 5, 6];
const FILTER: [i64; 5] = [1, 4, 3, 2, 2];
const OUT: [i64; 4] = [1, 3, 10, 12];

fn size(shape: &[i64]) -> usize {
    shape.iter().product::<i64>() as usize
}

fn run(path: &str, elements: i64) -> Result<f64, String> {
    let artifact = unsafe { Artifact::open(path)? };
    let data: Vec<f32> = (0..size(&DATA)).map(|i| (i % 7) as f32 - 3.0).collect();
    let filter: Vec<f32> = (0..size(&FILTER)).map(|i| (i % 5) as f32 - 2.0).collect();
    let shape = [elements]; // of the manifest: packed_shape
    let mut packed = vec![0.0f32; size(&shape)];
    artifact.pack(
        &Array::input(&filter, &FILTER),
        &Array::output(&mut packed, &shape),
    )?;
    let mut out = vec![f32::NAN; size(&OUT)];
    let written = Array::output(&mut out, &OUT);
    artifact.call(
        &Array::input(&data, &DATA),
        &Array::input(&packed, &shape),
        None,
        &written,
        0,
    )?;
    Ok(out
        .iter()
        .enumerate()
        .map(|(i, value)| f64::from(*value) * (i % 3 + 1) as f64)
        .sum())
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let elements = arguments.get(2).and_then(|text| text.parse().ok());
    let (Some(path), Some(elements)) = (arguments.get(1), elements) else {
        eprintln!("usage: {} LIBRARY PACKED_ELEMENTS", arguments[0]);
        std::process::exit(2);
    };
    match run(path, elements) {
        Ok(sum) => println!("{sum:.6}"),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}
