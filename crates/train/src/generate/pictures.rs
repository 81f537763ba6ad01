//! Images of ten prototypes, shifted and with noise.

use crate::data::Images;
use paramill_core::prng::Prng;

const SIDE: usize = 28;
const CLASSES: usize = 10;
/// An image is shifted by up to this many pixels in both directions.
const SHIFT: i64 = 2;
/// Deviation of the noise of a pixel.
const NOISE: f64 = 100.0;
/// Blobs that a prototype is made of.
const BLOBS: usize = 4;

/// Made images and the prototypes they come from.
#[derive(Debug, Clone)]
pub struct MadeImages {
    /// To train on.
    pub train: Images,
    /// Held out: a quarter as many.
    pub test: Images,
    /// The image of each class before shift and noise.
    pub prototypes: Vec<Vec<f64>>,
}

impl MadeImages {
    /// Accuracy on the held-out images of a classifier that knows the prototypes: the nearest shifted one wins.
    pub fn informed_accuracy(&self) -> f64 {
        let shifted: Vec<(usize, Vec<f64>)> = self
            .prototypes
            .iter()
            .enumerate()
            .flat_map(|(class, image)| shifts().map(move |shift| (class, shifted(image, shift))))
            .collect();
        let nearest = |pixels: &[u8]| {
            let distance = |image: &[f64]| -> f64 {
                image.iter().zip(pixels).map(|(image, &pixel)| (image - f64::from(pixel)).powi(2)).sum()
            };
            let distances = shifted.iter().map(|(class, image)| (distance(image), *class));
            distances.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, class)| class)
        };
        let right = (0..self.test.len())
            .filter(|&index| nearest(self.test.image(index)) == Some(usize::from(self.test.labels[index])));
        right.count() as f64 / self.test.len() as f64
    }
}

/// Makes `count` images of 28 x 28 in ten classes to train on.
pub fn images(seed: u64, count: usize) -> MadeImages {
    let mut prng = Prng::fork(seed, 0x1ba6e);
    let prototypes: Vec<Vec<f64>> = (0..CLASSES).map(|_| prototype(&mut prng)).collect();
    let mut draw = |count: usize| {
        let mut images = Images { height: SIDE, width: SIDE, pixels: Vec::new(), labels: Vec::new() };
        for _ in 0..count {
            let class = prng.below(CLASSES as u64) as usize;
            let mut offset = || prng.below(2 * SHIFT as u64 + 1) as i64 - SHIFT;
            let image = shifted(&prototypes[class], (offset(), offset()));
            images.pixels.extend(image.iter().map(|pixel| (pixel + NOISE * rough_normal(&mut prng)) as u8));
            images.labels.push(class as u8);
        }
        images
    };
    let train = draw(count);
    let test = draw((count / 4).max(1));
    MadeImages { train, test, prototypes }
}

/// A few soft blobs at random places.
fn prototype(prng: &mut Prng) -> Vec<f64> {
    let mut place = || 6.0 + 16.0 * prng.uniform();
    let blobs: Vec<(f64, f64)> = (0..BLOBS).map(|_| (place(), place())).collect();
    let pixel = |index: usize| {
        let (y, x) = ((index / SIDE) as f64, (index % SIDE) as f64);
        let lights = blobs.iter().map(|(by, bx)| (-((y - by).powi(2) + (x - bx).powi(2)) / 8.0).exp());
        200.0 * lights.fold(0.0, f64::max)
    };
    (0..SIDE * SIDE).map(pixel).collect()
}

fn shifts() -> impl Iterator<Item = (i64, i64)> {
    (-SHIFT..=SHIFT).flat_map(|down| (-SHIFT..=SHIFT).map(move |right| (down, right)))
}

/// The image moved down and to the right; what comes in from outside is black.
fn shifted(image: &[f64], (down, right): (i64, i64)) -> Vec<f64> {
    let side = SIDE as i64;
    let pixel = |index: i64| {
        let (y, x) = (index / side - down, index % side - right);
        let inside = (0..side).contains(&y) && (0..side).contains(&x);
        if inside { image[(y * side + x) as usize] } else { 0.0 }
    };
    (0..side * side).map(pixel).collect()
}

/// Near enough to normal for noise, and far cheaper: the sum of four uniform draws from one number.
fn rough_normal(prng: &mut Prng) -> f64 {
    let bits = prng.next_u64();
    let sum: u64 = (0..4).map(|part| (bits >> (16 * part)) & 0xffff).sum();
    (sum as f64 / 65536.0 - 2.0) * 3f64.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_the_same_images_and_the_classes_can_be_told_apart() {
        let made = images(1, 400);
        assert_eq!(made.train, images(1, 400).train);
        assert_ne!(made.train, images(2, 400).train);
        assert_eq!((made.train.len(), made.test.len()), (400, 100));
        assert!(made.informed_accuracy() >= 0.99, "{}", made.informed_accuracy());
    }
}
