"""What images, sounds and videos have in common: the files that hold them, and the towers of a checkpoint that make rows of them. The
package knows neither Pillow nor what a sound is; it may import model, checkpoint and what lies below them."""
